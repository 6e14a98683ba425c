#pragma once
// One step in virtual time: what `simulate` runs.
#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "scheduler/plan/walk.hpp"
#include "scheduler/simulation/input_copies.hpp"
#include "scheduler/simulation/simulator.hpp"
#include "scheduler/simulation/snapshot.hpp"
#include "scheduler/tasks/lowering.hpp"
#include "scheduler/tasks/task_graph.hpp"

namespace tandem {

/// See `simulate`.
class Simulator {
 public:
  /// `plan` has the micro-batches of `walked`, which stand for those of `whole`. `piece`: elements that the plan's
  /// pieces are coarse pieces of; 0: they are not.
  Simulator(const ParameterLayout& layout, const Plan& plan, const MachineProfile& profile,
            std::span<const LayerSeconds> compute, const SimulationOptions& options, const Accumulation& walked,
            const Accumulation& whole, std::int64_t piece, SimulationMemory& memory)
      : layout_(layout),
        plan_(plan),
        costs_(profile, plan.state, plan.update_threads),
        compute_(compute),
        options_(options),
        lowering_(layout, plan),
        walked_(walked),
        sums_(whole.micro_batches * plan.rank.count > 1),
        stand_for_several_(walked.micro_batches < whole.micro_batches),
        piece_(piece),
        walk_(walk_of(layout.layer_count(), walked, whole, plan.owners_make_gradients)),
        graph_(memory.graph),
        tasks_(memory.tasks),
        // The last layer computes the loss: it takes in what the one before it leaves, and leaves nothing.
        inputs_(layout.layers().size() - 1, static_cast<std::size_t>(walked.at_once)) {
    compute_left_ = static_cast<double>(walk_.passes - 1) * seconds_of(walk_.pass) + seconds_of(walk_.last);
    if (options.disk_share > 0.0) writing_ = costs_.writing(options.disk_share);
  }

  Simulation run();

 private:
  /// Something in flight: the head of a lane.
  struct Flight {
    TaskId id = no_task;
    TaskCost cost;
    double left = 0.0;  ///< share of the work still to do
    double begin = 0.0;
    bool running = false;
  };
  /// One piece of the caller's work on its stream.
  struct Compute {
    std::vector<TaskId> begins;  ///< the caller's tasks whose dependencies its stream waits for
    std::vector<TaskId> ends;    ///< ... that are done with it
    int layer = 0;
    bool backward = false;
    bool opens_pass = false;
    double seconds = 0.0;
    InputCopies::Part inputs{};
  };

  TaskId warm_up();
  void update();
  void begin_step();
  bool gradients_complete() const;
  void submit(const Action& stands_for = {});
  bool advance_caller();
  bool act(const Action& action);
  double seconds_of(const Action& action) const;
  double seconds_of(std::span<const Action> actions) const;
  void queue_compute(const Action& action, bool backward);
  InputCopies::Part inputs_of(const Action& action, bool backward);
  void end_with_last_compute(TaskId id);
  bool may_begin(TaskId id);
  bool may_run(const Compute& compute) const;
  bool issue();
  bool start_heads();
  Flight& flight_of(InputCopies::Way way) { return flights_[lane_count + static_cast<std::size_t>(way)]; }
  bool start_input_copies();
  double times(const Task& task) const;
  TaskCost cost_of(const Task& task) const;
  double least_seconds() const;
  bool gives_up();
  void bound_by_updates();
  void start(Flight& flight, TaskId id, const TaskCost& cost);
  void pass_time();
  void open_pass();
  std::int64_t passes_to_skip() const;
  void skip(std::int64_t passes);
  void done(TaskId id);
  void finish(Lane lane);
  void finish_compute();
  void finish_input_copy(InputCopies::Way way);
  void account(const Task& task, double seconds);
  bool finished() const { return action_ == walk_.size() && graph_.empty() && computes_.empty(); }

  const ParameterLayout& layout_;
  const Plan& plan_;
  const CostModel costs_;
  std::span<const LayerSeconds> compute_;
  const SimulationOptions& options_;
  Lowering lowering_;
  const Accumulation walked_;
  const bool sums_;               ///< several gradients of a layer add up in a step
  const bool stand_for_several_;  ///< some micro-batches do
  const std::int64_t piece_;      ///< elements of what coarse pieces are made of; 0: nothing is coarsened
  const Walk walk_;

  TaskGraph& graph_;
  TaskList& tasks_;
  TaskId first_id_ = 0;
  std::vector<double> times_;  ///< by task, where micro-batches are coarsened: that it stands for
  std::array<std::deque<TaskId>, lane_count> queues_;                  ///< issued to streams, the running one first
  std::array<Flight, lane_count + InputCopies::ways.size()> flights_;  ///< those of inputs last, by way
  std::optional<TaskCost> writing_;                                    ///< beside all of them, without an end
  std::deque<Compute> computes_;
  InputCopies inputs_;

  std::int64_t action_ = 0;
  bool blocked_ = false;       ///< in the middle of `walk_[action_]`
  TaskId begins_ = no_task;    ///< the caller's task that its thread wants to begin
  std::vector<TaskId> begun_;  ///< ... that it has begun since its last compute
  double zero_seconds_ = 0.0;  ///< of fresh gradient buffers, before the next compute
  LayerUse use_;
  GradientUse gradients_;

  double now_ = 0.0;
  double update_end_ = 0.0;
  bool save_begun_ = false;
  std::int64_t saves_left_ = 0;
  double backward_since_ = -1.0;
  std::int64_t updates_left_ = 0;
  double compute_seconds_ = 0.0;
  double least_ = 0.0;         ///< a step takes at least as long, its overhead left out
  double compute_left_ = 0.0;  ///< of the caller's stream, alone
  std::int64_t pending_ = 0;   ///< tasks that are not done
  Done to_device_, to_host_, cpu_update_;
  std::vector<Snapshot> openings_;  ///< when the last three passes of this step began on the caller's stream
  Simulation result_;
};

}  // namespace tandem
