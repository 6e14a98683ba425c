#pragma once
// The report of `tandem report`: a run as one page that needs no network.
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "train/report/run_directory.hpp"

namespace tandem {

/// One step of a run, or several together, as metrics.jsonl has them. Values that were not finite are empty.
struct RunPoint {
  std::int64_t step = 0;  ///< the last one
  std::optional<double> loss, grad_norm, lr, tokens_per_second, device_bytes, eval_loss;
  std::string bound_by;
};

class RunReport {
 public:
  /// Reads the files of a run, which may still train. Throws InputError where the folder holds no metrics of a run.
  explicit RunReport(const std::filesystem::path& run);

  std::int64_t steps() const noexcept { return points_.back().step; }
  /// The lowest loss on evaluation data, and its step; null where nothing was evaluated.
  const RunPoint* best() const noexcept;
  std::string html() const;

 private:
  std::vector<std::pair<std::string, std::string>> facts() const;
  void add_measured(std::vector<std::pair<std::string, std::string>>& rows) const;
  nlohmann::ordered_json data() const;

  std::filesystem::path run_;
  std::vector<RunCommand> commands_;  ///< the first one and each resume
  std::vector<RunPoint> points_;      ///< step by step, not empty
  nlohmann::ordered_json summary_;    ///< null until the run has ended
};

/// Joins neighbours until no more than `most` points are left, at least one: means, but the last learning rate and
/// evaluation, the largest memory, and what bound most steps.
std::vector<RunPoint> thinned(const std::vector<RunPoint>& points, std::size_t most);

}  // namespace tandem
