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
  /// Compute of a backward begins: that of its pass, if it is the first.
  void begin_backward(double now) noexcept {
    if (!in_backward_) backward_since_ = now;
    in_backward_ = reached_backward_ = true;
  }
  /// Forward of a pass begins, with what it waits for: where the compute before it has ended.
  void begin_forward() noexcept {
    if (in_backward_) backward_seconds_ += compute_end_ - backward_since_;
    in_backward_ = false;
  }
  /// Seconds passed in which the caller's stream stood still while updates were pending.
  void stand_still(double seconds) noexcept;
  /// Compute has ended now, after so many seconds.
  void add_compute(double seconds, double now) noexcept {
    compute_seconds_ += seconds;
    compute_end_ = now;
  }
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
  bool in_backward_ = false;
  bool reached_backward_ = false;  ///< in any pass
  double backward_since_ = 0.0;    ///< when the present backward began
  double backward_seconds_ = 0.0;  ///< seconds of the backwards before it
  double compute_end_ = 0.0;       ///< when the last compute ended
  double compute_seconds_ = 0.0;
  Done to_device_, to_host_, cpu_update_;
  std::vector<Snapshot> openings_;  ///< when the last three passes of this step began on the caller's stream
  Simulation result_;
};

}  // namespace tandem
