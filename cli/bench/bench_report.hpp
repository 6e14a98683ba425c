#pragma once
// The report of `tandem bench`, as JSON, as text, and as one page that needs no network.
#include <filesystem>
#include <string>
#include <vector>

#include "cli/bench/bench_rows.hpp"

namespace tandem {

/// A point of the closed form: what bounds the update rate at a share of the CPU.
struct BoundPoint {
  std::string machine;  ///< how it was emulated, where that was swept
  double cpu_share = 0.0;
  double parameters_per_second = 0.0;
};

struct BenchReport {
  std::string machine;
  std::string model;
  std::string command;
  double parameters = 0.0;
  double tokens = 0.0;            ///< tokens of a step
  bool compute_measured = false;  ///< forward and backward are predicted as measured, not by the calibration alone
  std::vector<BenchRow> rows;
  std::size_t missing = 0;  ///< rows that an interruption left out
  std::vector<BoundPoint> bound;
  std::filesystem::path timeline;  ///< trace of one simulated step, of the best row; empty: none

  std::string json() const;
  std::string html() const;
  /// The row with the least step time; null where nothing fits.
  const BenchRow* best() const;
  /// Table for people.
  std::string table() const;
};

}  // namespace tandem
