#pragma once
// A checkpoint directory: `manifest.json` and `state.safetensors` with tensors master.NAME, m.NAME and
// v.NAME (F32, in model order; a frozen parameter has a master alone). It appears under its name only
// when it is whole and on the disk. docs/checkpoints.md describes the files.
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "io/safetensors.hpp"

namespace tandem {

/// The three arrays of a parameter, in the order of file and digest.
enum class StatePart : std::uint8_t { master, m, v };
constexpr int state_parts = 3;

struct CheckpointParameter {
  std::string name;
  std::vector<std::int64_t> shape;
  bool trainable = true;
  std::int64_t count() const noexcept;
};

/// What a checkpoint says of itself, beside the state.
struct Manifest {
  static constexpr int format = 1;
  std::string tandem_version;
  std::string model_name;
  std::string model_config;  ///< text of a Hugging Face config.json
  std::string token_kind;    ///< "bytes" or "ids"
  std::string compute_key;
  std::string schedule;  ///< readable
  std::string plan;      ///< JSON of the plan it ran under, for people
  std::string state_digest;
  std::int64_t step = 0;       ///< steps taken, skipped ones included
  std::int64_t adam_step = 0;  ///< updates applied
  std::int64_t skipped_steps = 0;
  std::int64_t tokens = 0;  ///< targets so far
  std::optional<double> first_loss;
  std::optional<double> last_loss;
  std::uint64_t seed = 0;
  std::int64_t sampler_windows = 0;
  std::int64_t sampler_epoch = 0;
  std::int64_t sampler_position = 0;
  std::vector<CheckpointParameter> parameters;
};

/// Fills `values` with one array of parameter `index`.
using StateReader = std::function<void(std::size_t index, StatePart part, std::span<float> values)>;

/// "step-00000100".
std::string checkpoint_name(std::int64_t step);

/// Writes `root/step-XXXXXXXX` through a hidden folder beside it, and fills in the manifest's state_digest.
/// `buffer` must hold the largest parameter: all memory that this takes. An existing checkpoint of the
/// step is replaced. Blocks. Throws WriteError; what was there before stays.
std::filesystem::path write_checkpoint(const std::filesystem::path& root, Manifest& manifest, std::span<float> buffer,
                                       const StateReader& read);

/// A checkpoint that has been checked whole.
class Checkpoint {
 public:
  /// Reads the manifest and checks the hash of every file. Throws InputError.
  explicit Checkpoint(const std::filesystem::path& directory);

  const Manifest& manifest() const noexcept { return manifest_; }
  const std::filesystem::path& directory() const noexcept { return directory_; }
  /// One array of parameter `index`; moments of a frozen one are zero.
  void read(std::size_t index, StatePart part, std::span<float> values) const;
  /// Index of a parameter by name. Throws InputError where there is none.
  std::size_t index_of(const std::string& name) const;
  /// Computed from the stored state. Takes memory for one block.
  std::string state_digest() const;

 private:
  std::filesystem::path directory_;
  Manifest manifest_;
  std::unique_ptr<SafetensorsReader> state_;
};

bool is_checkpoint(const std::filesystem::path& directory);

/// The newest checkpoint below `root` that checks whole, or null; each one passed over is told to
/// `passed_over` with the reason.
std::unique_ptr<Checkpoint> newest_checkpoint(
    const std::filesystem::path& root,
    const std::function<void(const std::filesystem::path&, const std::string&)>& passed_over);

/// Deletes all but the newest `keep` below `root`, and what an interrupted save left. `keep` < 1: keeps all.
/// Does not throw: an old checkpoint that stays is no reason to end a run.
void prune_checkpoints(const std::filesystem::path& root, int keep) noexcept;

}  // namespace tandem
