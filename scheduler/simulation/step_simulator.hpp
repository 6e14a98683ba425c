#pragma once
// One step in virtual time: what `simulate` runs.
#include <cstdint>
#include <span>

#include "scheduler/simulation/step_caller.hpp"
#include "scheduler/simulation/step_lanes.hpp"
#include "scheduler/simulation/step_record.hpp"
#include "scheduler/simulation/step_tasks.hpp"
#include "scheduler/tasks/lowering.hpp"

namespace tandem {

/// See `simulate`. Drives the caller and the lanes, and notes in the record what they do.
class Simulator {
 public:
  /// `plan` has the micro-batches of `walked`, which stand for those of `whole`. `piece`: elements that the plan's
  /// pieces are coarse pieces of; 0: they are not. All but the accumulations must outlive it.
  Simulator(const ParameterLayout& layout, const Plan& plan, const MachineProfile& profile,
            std::span<const LayerSeconds> compute, const SimulationOptions& options, const Accumulation& walked,
            const Accumulation& whole, std::int64_t piece, SimulationMemory& memory);

  Simulation run();

 private:
  void update();
  void begin_step();
  bool ends_a_step() const;
  void begin_next_step();
  bool gradients_complete() const;
  bool ended() const;
  bool start_heads();
  bool start_compute();
  bool start_input_copies();
  void open_pass();
  double least_seconds() const;
  bool gives_up() const { return !settles_ && least_seconds() > options_.give_up_after; }
  void pass_time();
  void finish(Lane lane);
  void finish_compute(const Flight& flight);
  void finish_input_copy(InputCopies::Way way);

  const ParameterLayout& layout_;
  const Plan& plan_;
  const SimulationOptions& options_;
  const CostModel costs_;
  Lowering lowering_;
  StepTasks tasks_;
  StepCaller caller_;
  StepLanes lanes_;
  StepRecord record_;
  bool ahead_;  ///< whether updates run in backward, all of them or some
  /// The step at hand only leaves what a step finds: where updates run in backward, those of the step before.
  bool settles_;
  bool save_begun_ = false;
  std::int64_t saves_left_ = 0;
  double least_ = 0.0;  ///< a step takes at least as long, its overhead left out
};

}  // namespace tandem
