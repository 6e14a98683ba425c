#pragma once
// Checkpoints of a run, written while training goes on: from a copy of the state, or out of the engine.
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "io/checkpoint.hpp"
#include "offload/engine/state_io.hpp"
#include "train/config/config.hpp"
#include "train/saving/save_pace.hpp"
#include "train/saving/save_prediction.hpp"

namespace tandem {

struct SaverOptions {
  std::filesystem::path root;  ///< folder of the checkpoints
  int keep = 2;
  /// Reads the state into a copy first, which takes StateCopy::bytes of memory, and not at the pace of the disk, which
  /// takes a buffer of save_buffer_values. Either way an update waits until the state that it overwrites has been read.
  /// A copy is written at a SavePace; without one, as fast as can be. Where no step follows nothing is copied.
  bool copies = false;
  /// Whether this process writes: with ranks in several the others only read, for the one that does.
  bool writes = true;
  bool ranks_elsewhere = false;  ///< whether other processes read the same, which then all is read for, come what may
  OnSaveFailure on_failure = OnSaveFailure::stop;
  SavedState saved = SavedState::all;
  /// Hashes, by full name, of the frozen parameters that are not saved.
  std::map<std::string, std::string> elsewhere{};
  std::map<std::string, std::string> original{};  ///< hashes of the coded ones' values in the base
  std::vector<FileBeside> beside{};               ///< copied into every checkpoint, where they still exist
  /// Predicts the steps beside a save under a plan, on a disk of so many bytes a second (0: not measured yet). Called
  /// on the saver's thread; may be empty.
  std::function<std::optional<SaveSlowdown>(const Plan& plan, double disk)> predict{};
  std::function<bool()> urgent{};  ///< whether training is about to end; asked on the saver's threads, may be empty
  PaceClock clock = PaceClock::real();
  double watchdog_seconds = 300.0;  ///< a save that is waited for and writes nothing for so long has stalled
};

/// Driven by one thread, with a thread of its own that writes. At most one save is under way.
class CheckpointSaver {
 public:
  /// Takes its memory. `engines`: one, or rank by rank those of a group; they must outlive it. `say` is told of every
  /// checkpoint that is done.
  CheckpointSaver(std::vector<OffloadEngine*> engines, SaverOptions options,
                  std::function<void(const std::string&)> say);
  /// Waits for a save under way; its failure is dropped, because `finish` reports it. One that has stalled is reported
  /// (report_stall), and waited for all the same: its thread writes from memory of this object.
  ~CheckpointSaver();

  /// Saves the engine's state under the manifest's step (parameters, adam_step, digest and files are filled in
  /// here). Waits for a save under way, as `finish` does, and then returns at once. `steps`: after so many the next
  /// save is due, or the run ends; 0: it has ended. `best`: this one stays, whatever comes. Throws and returns as
  /// `poll` does; throws DeviceError where no thread can be had, and then there is no save.
  bool save(Manifest manifest, std::int64_t steps, bool best = false);
  /// Whether a save is under way, of which nobody has asked for the outcome; whether it is done.
  bool under_way() const noexcept { return under_way_; }
  bool is_done() const noexcept { return done_; }
  /// Looks whether the save under way is done, and does not wait. Where it failed: throws WriteError, or warns
  /// and returns false if the run is to go on.
  bool poll();
  /// Waits for the save under way, which from now on goes as fast as can be. `last`: a failure throws, also where the
  /// run would go on. Throws StalledError where the disk takes nothing for `watchdog_seconds`.
  bool finish(bool last);
  /// A step has ended that took so long.
  void note_step(double seconds);
  /// Share of the save under way that is written; empty where there is none.
  std::optional<double> progress() const noexcept;
  /// The checkpoint that stays, of a resumed run.
  void set_best(const std::filesystem::path& best) { best_ = best; }

 private:
  /// Number and seconds of steps of one kind.
  struct Steps {
    int count = 0;
    double seconds = 0.0;
    double mean() const noexcept { return count > 0 ? seconds / count : 0.0; }
  };

  void write() noexcept;
  void wait_for_the_thread();
  std::filesystem::path write_copy(CheckpointContent& content);
  std::filesystem::path write_beside(CheckpointContent& content);
  std::filesystem::path write_or_read(CheckpointContent& content, const StateReader& read);
  void write_state();
  void let_go();
  StateReader timed(StateReader read);
  std::span<float> buffer();
  bool conclude(bool last);
  std::string cost_of_the_save() const;

  std::vector<OffloadEngine*> engines_;
  OffloadEngine& engine_;  ///< the first
  SaverOptions options_;
  std::function<void(const std::string&)> say_;
  std::unique_ptr<StateCopy> copy_;
  bool takes_copy_ = false;           ///< whether the save under way writes from a copy
  std::optional<StateOfSave> scope_;  ///< state of the save under way; its thread lets it go
  std::vector<float> buffer_;         ///< used where there is no copy, whose memory serves as well
  SavePace pace_;
  double step_seconds_ = 0.0;  ///< seconds of the last step

  Manifest manifest_;
  bool best_pending_ = false;
  std::filesystem::path best_;
  std::filesystem::path written_;
  double began_ = 0.0;
  double waited_ = 0.0;  ///< seconds that updates waited in all saves before this one
  double seconds_ = 0.0;
  Plan plan_;          ///< plan under which the save under way began
  double disk_ = 0.0;  ///< bytes a second of the last save; 0: not known
  double measured_disk_ = 0.0;
  Steps alone_;   ///< steps since the last save
  Steps beside_;  ///< steps that the save under way has affected
  bool affects_step_ = false;
  std::optional<SaveSlowdown> predicted_;
  std::uint64_t total_bytes_ = 0;
  std::exception_ptr failure_;
  std::atomic<std::uint64_t> bytes_{0};
  std::atomic<bool> state_is_read_{false};  ///< the save under way has read the state: nothing waits for it any more
  std::atomic<bool> done_{false};
  std::mutex mutex_;  ///< guards the wait for `done_`
  std::condition_variable wakes_;
  bool under_way_ = false;
  std::thread thread_;
};

}  // namespace tandem
