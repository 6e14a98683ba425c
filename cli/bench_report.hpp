#pragma once
// What `tandem bench` found, as JSON and as one page that needs no network.
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "scheduler/simulator.hpp"

namespace tandem {

/// Medians over steps.
struct MeasuredStep {
  double step_seconds = 0.0;
  double forward_seconds = 0.0;
  double backward_seconds = 0.0;
  double update_seconds = 0.0;
  double exposed_update_seconds = 0.0;
  double tokens_per_second = 0.0;
};

struct PolicyResult {
  std::string policy;   ///< as asked for
  std::string refusal;  ///< why it does not fit; the rest is empty then
  std::string resolved;
  Plan::Shares shares;
  Simulation predicted;
  std::optional<MeasuredStep> measured;  ///< where it was executed
  std::size_t planned_device_bytes = 0;
  std::size_t planned_host_bytes = 0;
  std::size_t peak_device_bytes = 0;
  std::string state_digest;
};

/// A point of the closed form: what bounds the update rate at a share of the CPU.
struct BoundPoint {
  double cpu_share = 0.0;
  double parameters_per_second = 0.0;
};

struct BenchReport {
  std::string machine;
  std::string model;
  std::string command;
  double parameters = 0.0;
  double tokens = 0.0;  ///< of a step
  std::vector<PolicyResult> policies;
  std::vector<BoundPoint> bound;
  std::filesystem::path timeline;  ///< trace of one simulated step; empty: none

  std::string json() const;
  std::string html() const;
  /// The row with the least measured step, predicted where nothing was executed; null where nothing fits.
  const PolicyResult* best() const;
  /// For people.
  std::string table() const;
};

/// Chart.js, which draws the report's plots, minified; embedded when tandem is built.
std::string_view chart_library() noexcept;

}  // namespace tandem
