#pragma once
// Result of a simulated step as it accumulates: seconds, rates and use of resources.
#include <cstdint>
#include <vector>

#include "scheduler/simulation/simulator.hpp"
#include "scheduler/simulation/snapshot.hpp"
#include "scheduler/tasks/task.hpp"

namespace tandem {

class StepRecord {
 public:
  ResourceShares& use() noexcept { return result_.use; }  ///< seconds, until the result has shares
  void begin_next_step() noexcept { ++result_.steps; }
  void begin_pass_anew() noexcept { openings_.clear(); }
  /// No update is pending any more.
  void end_updates(double now) noexcept { update_end_ = now; }
  /// The first compute of a backward begins.
  void begin_backward(double now) noexcept {
    if (backward_since_ < 0.0) backward_since_ = now;
  }
  /// Seconds passed in which the caller's stream stood still while updates were pending.
  void stand_still(double seconds) noexcept;
  void add_compute(double seconds) noexcept { compute_seconds_ += seconds; }
  /// A task that stands for `times` has ended now, after so many seconds.
  void add(const Task& task, double seconds, double times);

  /// A pass begins on the caller's stream. Returns whether the last ones repeat each other.
  bool open_pass(double now, std::int64_t pending);
  /// Adds passes that are skipped, each like the last one. Returns how many seconds they take.
  double skip(std::int64_t passes);

  /// Result of a step that ends now.
  Simulation result(double now, std::int64_t tasks, const CostModel& costs);
  /// Result of a step that takes longer than this.
  Simulation given_up(double least_seconds, std::int64_t tasks);

 private:
  double update_end_ = 0.0;
  double backward_since_ = -1.0;
  double compute_seconds_ = 0.0;
  Done to_device_, to_host_, cpu_update_;
  std::vector<Snapshot> openings_;  ///< when the last three passes of this step began on the caller's stream
  Simulation result_;
};

}  // namespace tandem
