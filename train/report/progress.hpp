#pragma once
// Progress of a run for people: one live line on a terminal, plain lines elsewhere.
#include <cstdint>
#include <optional>
#include <string>

#include "train/report/run_directory.hpp"

namespace tandem {

class Progress {
 public:
  /// Prints to standard output; `every` 0 or `quiet`: no step lines.
  Progress(std::int64_t steps, std::int64_t every, bool quiet);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void line(const std::string& text);
  /// `saving`: share of a checkpoint under way.
  void step(const StepMetrics& metrics, std::optional<double> saving = std::nullopt);

 private:
  std::int64_t steps_;
  std::int64_t every_;
  bool quiet_;
  bool terminal_;
  bool live_ = false;
  double smoothed_ = 0.0;  // seconds a step
};

}  // namespace tandem
