#pragma once
// The files of a run, and the lock that keeps two processes out of one folder.
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "train/config/pair_metrics.hpp"
#include "train/report/resource_use.hpp"

namespace tandem {

/// Whether the folder holds a run (or part of one).
bool holds_run(const std::filesystem::path& out);
/// Throws UsageError where it does.
void refuse_held(const std::filesystem::path& out);

/// Throws WriteError where another process is writing the run. Creates nothing.
void refuse_locked(const std::filesystem::path& out);

/// A command that a run was begun or gone on with.
struct RunCommand {
  std::int64_t step = 0;  ///< steps that were taken before
  std::string command;    ///< command line as it was typed
};
/// All of a run's, the first one first: of commands.jsonl, and where that is missing of summary.json, which has the
/// last one alone.
std::vector<RunCommand> commands_of(const std::filesystem::path& run);

/// One line of metrics.jsonl. Values that are not finite are written as null.
struct StepMetrics {
  std::int64_t step = 0;
  double loss = 0.0;
  double grad_norm = 0.0;
  double lr = 0.0;
  double step_seconds = 0.0;
  double tokens_per_second = 0.0;
  double exposed_update_seconds = 0.0;
  ResourceUse use;
  std::uint64_t device_bytes = 0;
  bool skipped = false;
  std::uint64_t speculated_parameters = 0;  ///< updated in it before its norm was known, padding counted
  std::string_view
      speculation;  ///< outcome of its updates, where some could run before: "confirmed", "rolled_back"; else empty
  std::optional<double> eval_loss;
  std::optional<PairMetrics> pairs{};  ///< figures of --objective dpo, likewise those of its evaluations
  std::optional<PairMetrics> eval_pairs{};
  std::string json() const;
};

/// An open run folder, locked. The lock dies with the process. Where it ends before its metrics are opened, what it had
/// created is removed: a run that is refused leaves nothing behind.
class RunDirectory {
 public:
  /// Creates the folder where it is missing and locks it. Throws WriteError where it cannot be written or
  /// another process has it, UsageError where a `fresh` run finds one there that came in between.
  RunDirectory(std::filesystem::path out, bool fresh);
  ~RunDirectory();
  RunDirectory(const RunDirectory&) = delete;
  RunDirectory& operator=(const RunDirectory&) = delete;

  std::filesystem::path checkpoints() const { return out_ / "checkpoints"; }
  bool has_config() const;
  void write_config(const std::string& toml);
  /// Text of summary.json; empty where there is none.
  std::string summary() const;
  void write_summary(const std::string& json);
  void remove_summary() noexcept;
  /// Adds a command to those that the run was begun and gone on with, from `step` on. A fresh run has none before it.
  void add_command(std::int64_t step, const std::string& command, bool fresh);
  /// Opens metrics.jsonl, cut back to the lines of steps 1 ... `step`.
  void open_metrics(std::int64_t step);
  /// Appends a line and flushes. Throws WriteError.
  void append(const StepMetrics& metrics);

 private:
  void lock();
  void close() noexcept;

  std::filesystem::path out_;
  std::vector<std::filesystem::path> made_;  ///< folders that were missing, the innermost first
  int lock_ = -1;
  bool made_lock_ = false;
  bool begun_ = false;
  std::ofstream metrics_;
};

}  // namespace tandem
