#pragma once
// Results of `tandem bench`, row by row: a policy under a setting. Rows are written as they end, so that an interrupted
// bench can be continued.
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "scheduler/simulation/simulator.hpp"

namespace tandem {

/// Figures of one step: simulated, or medians over measured ones.
struct StepFigures {
  double step_seconds = 0.0;
  double forward_seconds = 0.0;
  double backward_seconds = 0.0;
  double update_seconds = 0.0;
  double exposed_update_seconds = 0.0;
  double tokens_per_second = 0.0;
  std::string bound_by;
};

/// Figures of measured steps.
struct MeasuredFigures : StepFigures {
  int steps = 0;
  double spread = 0.0;  ///< spread of step_seconds: (longest - shortest) / median
};

/// Setting of a sweep: names of flags and their values, as typed. Empty without a sweep.
using BenchSetting = std::vector<std::pair<std::string, std::string>>;
/// "device-memory 300MiB, link-bandwidth 1GB/s".
std::string text_of(const BenchSetting& setting);
/// Every combination of the values of each flag; those of the last flag change fastest. One empty setting where there
/// are no flags.
std::vector<BenchSetting> combinations(const std::vector<std::pair<std::string, std::vector<std::string>>>& flags);

struct BenchRow {
  BenchSetting setting;
  std::string policy;   ///< the policy asked for
  std::string refusal;  ///< why it does not fit; the rest is empty then
  std::string resolved;
  std::string activations;  ///< name by activations_of()
  double cpu_share = 0.0;
  double streamed_share = 0.0;
  double resident_share = 0.0;
  StepFigures predicted;
  double ideal_step_seconds = 0.0;  ///< seconds of a step of the same plan without overhead, at most as predicted
  std::optional<MeasuredFigures> measured;
  std::uint64_t h2d_bytes = 0;  ///< bytes of parameters and their state that the plan moves in a step
  std::uint64_t d2h_bytes = 0;
  std::size_t planned_device_bytes = 0;
  std::size_t planned_host_bytes = 0;
  std::size_t peak_device_bytes = 0;
  std::string state_digest;

  bool fits() const noexcept { return refusal.empty(); }
  /// Measured where it was executed, else predicted.
  double step_seconds() const noexcept { return measured ? measured->step_seconds : predicted.step_seconds; }
  /// Policy and setting.
  std::string name() const;
};

nlohmann::ordered_json json_of(const BenchRow& row);
/// Throws nlohmann::json::exception where it is no row.
BenchRow row_of(const nlohmann::ordered_json& json);

/// OUT/rows.jsonl: a first line that says what is compared, then a line for each row that has ended.
class RowFile {
 public:
  /// Creates the file. Throws WriteError.
  RowFile(std::filesystem::path file, const nlohmann::ordered_json& head);
  /// Goes on with a file: a last line that is not whole is cut off. Throws UsageError where its head has other values
  /// than `head`, naming the first; InputError where the file cannot be read.
  static RowFile resume(const std::filesystem::path& file, const nlohmann::ordered_json& head);

  /// First line as written; `resume` allows it keys that are not compared.
  const nlohmann::ordered_json& head() const noexcept { return head_; }
  const std::vector<BenchRow>& rows() const noexcept { return rows_; }
  /// Handed to the system when it returns: it outlives the process. Throws WriteError.
  void append(const BenchRow& row);

 private:
  explicit RowFile(std::filesystem::path file) : file_(std::move(file)) {}
  void write(const nlohmann::ordered_json& line);

  std::filesystem::path file_;
  nlohmann::ordered_json head_;
  std::vector<BenchRow> rows_;
};

}  // namespace tandem
