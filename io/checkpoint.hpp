#pragma once
// A checkpoint directory: `manifest.json`, `state.safetensors` with tensors master.NAME, m.NAME and v.NAME
// (F32, in model order; a frozen parameter has a master alone, and Lion's state no v), and what its writer adds. It
// appears under its name only when it is whole and on the disk. docs/checkpoints.md describes the files.
#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/params/state_array.hpp"
#include "io/file_ops.hpp"
#include "io/manifest.hpp"
#include "io/safetensors.hpp"

namespace tandem {

/// Values of one array of parameter `index` from the `first` on, at least one: in memory of its own, or read into
/// `buffer` (which ends where the array does, or before). Asked for in the order of the file, each value once. Valid
/// until the next call.
using StateReader = std::function<std::span<const float>(std::size_t index, StateArray array, std::int64_t first,
                                                         std::span<float> buffer)>;

/// "step-00000100".
std::string checkpoint_name(std::int64_t step);

/// A file that a checkpoint takes along.
struct FileBeside {
  FileBeside(std::filesystem::path file) : from(std::move(file)), name(from.filename().string()) {}
  FileBeside(std::filesystem::path file, std::string as) : from(std::move(file)), name(std::move(as)) {}
  bool operator==(const FileBeside&) const = default;

  std::filesystem::path from;
  std::string name;  ///< in the checkpoint, without any folder
};

struct CheckpointContent {
  Manifest* manifest = nullptr;  ///< its state_digest and files are filled in
  StateReader read{};
  std::span<float> buffer{};                      ///< one value or more; empty where `read` needs none
  std::vector<FileBeside> beside{};               ///< files copied into the checkpoint
  std::function<void(std::uint64_t)> progress{};  ///< told how many bytes of state are written; may be empty
};

/// Writes `root/step-XXXXXXXX` through a hidden folder beside it. An existing checkpoint of the step is
/// replaced. Takes no memory but the buffer. Blocks. Throws WriteError, InputError where a file beside cannot be read,
/// and MisuseError where two have one name, or that of the state or the manifest; what was there before stays.
std::filesystem::path write_checkpoint(const std::filesystem::path& root, const CheckpointContent& content,
                                       FileOps& ops = system_files());

/// Values of one array of parameter `index` from the `first` on.
using StateWriter =
    std::function<void(std::size_t index, StateArray array, std::int64_t first, std::span<const float> values)>;

/// How much of a checkpoint is checked when it is opened. `state` reads what may be many GB.
enum class CheckpointCheck : std::uint8_t { all_but_state, state };

/// A checkpoint whose manifest, files and shapes belong together.
class Checkpoint {
 public:
  /// Reads the manifest and checks the hash of every file; of the state's file without CheckpointCheck::state only
  /// the size, and that its tensors are those of the manifest. Throws InputError.
  explicit Checkpoint(const std::filesystem::path& directory, CheckpointCheck check = CheckpointCheck::state);

  const Manifest& manifest() const noexcept { return manifest_; }
  const std::filesystem::path& directory() const noexcept { return directory_; }
  /// Elements [first, first + values.size()) of one array of parameter `index`; one that is not stored is zero.
  void read(std::size_t index, StateArray array, std::int64_t first, std::span<float> values) const;
  /// Reads all state once, in the order of the file and at the rate of the disk, and hands it out in pieces of at most
  /// ReadAhead::piece_bytes. Throws InputError where it turns out at the end that it is not what was saved: what has
  /// been handed out is then worthless. Takes ReadAhead::memory_bytes of memory.
  void stream(const StateWriter& write) const;
  /// Index of a parameter by name. Throws InputError where there is none.
  std::size_t index_of(const std::string& name) const;
  /// Files that its writer added, as they lie in the directory.
  std::vector<std::filesystem::path> files_beside() const;
  /// Computed from the stored state. Takes memory for one block.
  std::string state_digest() const;

 private:
  struct Stored {
    std::uint64_t begin = 0;  ///< bytes in the file
    std::uint64_t end = 0;
    std::size_t index = 0;
    StateArray array = StateArray::master;
  };
  std::vector<Stored> stored() const;

  std::filesystem::path directory_;
  Manifest manifest_;
  std::unique_ptr<SafetensorsReader> state_;
};

bool is_checkpoint(const std::filesystem::path& directory);

/// Conditions on the checkpoint that is looked for.
struct CheckpointSearch {
  CheckpointCheck check = CheckpointCheck::state;
  std::int64_t before = std::numeric_limits<std::int64_t>::max();  ///< the checkpoint is of an earlier step than this
};

/// The newest checkpoint below `root` that passes the check, or null; each one passed over is told to
/// `passed_over` with the reason. Throws NewerFormat: who went on from an older one, or afresh, would remove it.
std::unique_ptr<Checkpoint> newest_checkpoint(
    const std::filesystem::path& root,
    const std::function<void(const std::filesystem::path&, const std::string&)>& passed_over,
    const CheckpointSearch& search = {});

struct KeepOptions {
  int keep = 0;                     ///< newest whole ones that stay; < 1: all
  std::filesystem::path written{};  ///< just written, and so known to be good: stays
  std::filesystem::path best{};     ///< stays too; empty: none
};

/// Deletes what an interrupted save left, checkpoints of later steps than the one just written (a course
/// that the run has left by resuming before it), and whole ones beyond the newest `keep`. One that lacks its
/// files does not count. Does not throw: an old checkpoint that stays is no reason to end a run.
void prune_checkpoints(const std::filesystem::path& root, const KeepOptions& options,
                       FileOps& ops = system_files()) noexcept;

}  // namespace tandem
