#pragma once
// Checkpoints of a run: written while training waits, or from a copy while it goes on.
#include <atomic>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "api/state_io.hpp"
#include "io/checkpoint.hpp"
#include "train/config.hpp"

namespace tandem {

struct SaverOptions {
  std::filesystem::path root;  ///< of the checkpoints
  int keep = 2;
  bool background = false;  ///< takes StateCopy::bytes of memory; else a buffer for the largest parameter
  OnSaveFailure on_failure = OnSaveFailure::stop;
  std::vector<std::filesystem::path> beside;  ///< copied into every checkpoint, where they still exist
};

/// Driven by one thread, with a thread of its own while it writes. At most one save is under way.
class CheckpointSaver {
 public:
  /// Takes its memory. `engine` must outlive it; `say` is told of every checkpoint that is done.
  CheckpointSaver(OffloadEngine& engine, SaverOptions options, std::function<void(const std::string&)> say);
  /// Waits for a save under way; its failure is dropped, because `finish` reports it.
  ~CheckpointSaver();

  /// Saves the engine's state under the manifest's step (parameters, adam_step, digest and files are filled in
  /// here). In the background it returns once the state is copied; else when all is on the disk. Waits for a
  /// save under way first. `best`: this one stays, whatever comes. Throws and returns as `poll` does.
  bool save(Manifest manifest, bool best = false);
  /// Looks whether the save under way is done, and does not wait. Where it failed: throws WriteError, or warns
  /// and returns false if the run is to go on.
  bool poll();
  /// Waits for the save under way. `last`: a failure throws, also where the run would go on.
  bool finish(bool last);
  /// Share of the save under way that is written; empty where there is none.
  std::optional<double> progress() const noexcept;
  /// The checkpoint that stays, of a resumed run.
  void set_best(const std::filesystem::path& best) { best_ = best; }

 private:
  void write() noexcept;
  bool conclude(bool last);

  OffloadEngine& engine_;
  SaverOptions options_;
  std::function<void(const std::string&)> say_;
  std::unique_ptr<StateCopy> copy_;
  std::vector<float> buffer_;

  Manifest manifest_;
  bool best_pending_ = false;
  std::filesystem::path best_;
  std::filesystem::path written_;
  double began_ = 0.0;
  double held_ = 0.0;
  double seconds_ = 0.0;
  std::uint64_t total_bytes_ = 0;
  std::exception_ptr failure_;
  std::atomic<std::uint64_t> bytes_{0};
  std::atomic<bool> done_{false};
  bool under_way_ = false;
  std::thread thread_;
};

}  // namespace tandem
