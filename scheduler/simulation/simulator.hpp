#pragma once
// Runs a plan in virtual time over a machine profile: the lowering that the engine walks, the task graph
// that the executor asks what may run, and the cost model in place of streams and workers.
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "core/base/trace.hpp"
#include "core/params/parameter_layout.hpp"
#include "scheduler/machine/cost_model.hpp"
#include "scheduler/machine/profile.hpp"
#include "scheduler/plan/plan.hpp"
#include "scheduler/tasks/task_graph.hpp"

namespace tandem {

/// Memory that simulations use one after another: allocating it anew is a good part of a small simulation.
struct SimulationMemory {
  TaskGraph graph;
  TaskList tasks;
};

struct SimulationOptions {
  int micro_batches = 1;
  /// Whether the next forward starts while updates run, as the engine's does; else it waits for all of them.
  bool overlap_updates = true;
  /// A save begins with the updates, and steps are simulated until the one in which all of its state has been read: the
  /// profile must know the disk. Seconds of a step are then means over these.
  bool save = false;
  /// Share of the time in which the disk writes beside the step, with nothing that waits for it: the profile must know
  /// the disk where this is not 0.
  double disk_share = 0.0;
  /// Micro-batches that only repeat others are simulated too, which takes longer and changes no more than rounding
  /// does. With a trace they always are.
  bool each_micro_batch = false;
  /// Enough of those that pass at once are simulated for rates to be as a run measures them: the same step.
  bool measured_rates = false;
  /// About so many pieces of state are simulated, each as large as several: quicker, and less exact. 0: all as they
  /// are.
  std::int64_t coarse_pieces = 0;
  /// A step that is sure to take longer is not simulated to its end.
  double give_up_after = std::numeric_limits<double>::infinity();
  Trace* trace = nullptr;              ///< takes the spans of the step, in virtual seconds; may be null
  SimulationMemory* memory = nullptr;  ///< may be null: the simulation has its own
};

/// How fast a step's work went, as predicted or as measured, waits left out: what follows from a profile's figures.
struct StepRates {
  double compute_seconds = 0.0;  ///< seconds of forward and backward
  double to_device = 0.0;        ///< bytes a second while copying; 0: nothing was copied
  double to_host = 0.0;
  double cpu_update = 0.0;  ///< parameters a second while updating; 0: none was updated
};

/// One step in the steady state, from the end of the gradients to the end of the next step's gradients:
/// the updates of one step, then forward and backward of the next, with what overlaps.
struct Simulation {
  double step_seconds = 0.0;
  bool given_up = false;  ///< `step_seconds` is less than a step takes, and all else unknown
  int steps = 1;          ///< steps that were simulated
  double forward_seconds =
      0.0;  ///< until the first gradient buffer of a pass is asked for, waits included; of all passes
  double backward_seconds = 0.0;
  double update_seconds = 0.0;          ///< from the start of the updates to the end of the last
  double exposed_update_seconds = 0.0;  ///< part of update_seconds in which the caller's stream stands still in forward
  ResourceShares use{};                 ///< mean share of each resource over the step
  double cores_of_device = 0.0;         ///< cores in `use` that the device's kernels take, on the host device
  StepRates rates;
  std::int64_t tasks = 0;
  /// The resource that is used most, as a run would measure it; `name_of` says it in words. The host device's kernels
  /// count as use of the device alone, not of the cores that they run on. Never `link`: where both ways together are
  /// used most, it is the busier way.
  Resource bound_by() const noexcept;
};

/// `compute` has one entry for each layer. The caller walks as tandem's models do: forward through all layers,
/// the last one forward and backward in one use, backward through the others, the first without a use; each use
/// serves as many micro-batches as the plan has pass through at once.
/// Throws MisuseError where the plan is not one of the layout, and where it has state in a file of which the profile
/// says nothing (MachineProfile::knows_file).
Simulation simulate(const ParameterLayout& layout, const Plan& plan, const MachineProfile& profile,
                    std::span<const LayerSeconds> compute, const SimulationOptions& options = {});

}  // namespace tandem
