#include "scheduler/simulation/step_simulator.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

namespace tandem {

Simulator::Simulator(const ParameterLayout& layout, const Plan& plan, const MachineProfile& profile,
                     std::span<const LayerSeconds> compute, const SimulationOptions& options,
                     const Accumulation& walked, const Accumulation& whole, std::int64_t piece,
                     SimulationMemory& memory)
    : layout_(layout),
      plan_(plan),
      options_(options),
      costs_(profile, plan.state, plan.update_threads),
      lowering_(layout, plan),
      tasks_(plan, costs_,
             {whole.micro_batches * plan.rank.count > 1, walked.micro_batches < whole.micro_batches, piece}, memory),
      caller_(layout, plan, costs_, compute, walked, whole, lowering_, tasks_),
      lanes_(layout, tasks_,
             options.disk_share > 0.0 ? std::optional(costs_.writing(options.disk_share)) : std::nullopt),
      ahead_(plan.updates_in_backward || plan.counts_on_speculation()),
      settles_(ahead_) {}

Simulation Simulator::run() {
  tasks_.restart(caller_.warm_up());
  update();
  const auto given_up = [this] { return record_.given_up(least_seconds(), tasks_.submitted()); };
  if (gives_up()) return given_up();
  bool begun = options_.overlap_updates;
  if (begun) begin_step();
  while (true) {
    if (!begun && tasks_.graph().empty()) {
      begun = true;
      begin_step();
    }
    bool changed = true;
    while (changed) {
      changed = begun && caller_.advance();
      changed = lanes_.issue() || changed;
      changed = start_heads() || changed;
    }
    if (begun && ends_a_step()) {
      begin_next_step();
      begun = options_.overlap_updates;
      if (begun) begin_step();
      continue;
    }
    if (begun && ended()) break;
    if (begun || !tasks_.graph().empty()) pass_time();
    if (gives_up()) return given_up();
  }
  return record_.result(lanes_.now(), tasks_.submitted(), costs_);
}

/// The end of a step: its updates, and the save that is to begin with the first.
void Simulator::update() {
  TaskList& emitted = tasks_.emitted();
  tasks_.close_step(lowering_.step());
  lowering_.update(emitted);
  if (options_.save && !settles_ && !std::exchange(save_begun_, true)) {
    const std::size_t before = emitted.size();
    lowering_.save(emitted);
    saves_left_ = static_cast<std::int64_t>(emitted.size() - before);
  }
  lowering_.end_pass();
  if (!ahead_ && options_.give_up_after < std::numeric_limits<double>::infinity()) {
    least_ = std::max(least_, caller_.least_seconds(emitted));
  }
  tasks_.submit();
}

void Simulator::begin_step() {
  record_.begin_pass_anew();
  caller_.begin_step();
}

/// Whether a step ends that another follows.
bool Simulator::ends_a_step() const { return (settles_ || saves_left_ > 0) && gradients_complete(); }

void Simulator::begin_next_step() {
  if (std::exchange(settles_, false)) {
    record_ = {};
    lanes_.skip(-lanes_.now());
  } else {
    record_.begin_next_step();
  }
  caller_.rewind();
  update();
}

/// Whether the last step has ended. Where its updates run in backward, those that are left are the next one's to hide.
bool Simulator::ended() const {
  if (ahead_ && options_.overlap_updates) return gradients_complete();
  return caller_.finished() && tasks_.graph().empty();
}

/// Whether the engine's wait at the end of a step is over.
bool Simulator::gradients_complete() const {
  const std::vector<TaskId>& norms = lowering_.norm_tasks();
  return caller_.finished() &&
         std::all_of(norms.begin(), norms.end(), [&](TaskId id) { return tasks_.graph().done(id); });
}

/// The step takes at least as long: its stream can be no faster than alone.
double Simulator::least_seconds() const {
  const Flight& compute = lanes_.of(Lane::caller);
  const double done = compute.running ? (1.0 - compute.left) * compute.cost.seconds : 0.0;
  return std::max(least_, lanes_.now() + caller_.seconds_left() - done) + costs_.step_overhead();
}

// -- what begins -----------------------------------------------------------------------------------------

bool Simulator::start_heads() {
  bool moved = lanes_.start_tasks();
  moved = start_compute() || moved;
  return start_input_copies() || moved;
}

bool Simulator::start_compute() {
  if (lanes_.of(Lane::caller).running || !caller_.may_compute()) return false;
  const Compute& next = caller_.next();
  if (next.backward) record_.begin_backward(lanes_.now());
  if (next.opens_pass) {
    record_.begin_forward();
    open_pass();
  }
  lanes_.start(lanes_.of(Lane::caller), no_task, costs_.compute(next.seconds));
  return true;
}

/// Starts copies of inputs on streams of the caller's own, beside the engine's.
bool Simulator::start_input_copies() {
  bool moved = false;
  for (const InputCopies::Way way : InputCopies::ways) {
    const double stands_for = caller_.inputs().next(way);
    if (lanes_.of(way).running || stands_for == 0.0) continue;
    const auto bytes = static_cast<double>(plan_.offloaded_input_bytes);
    TaskCost cost = costs_.copy(bytes, way == InputCopies::Way::to_device);
    cost.seconds *= stands_for;
    lanes_.start(lanes_.of(way), no_task, cost);
    moved = true;
  }
  return moved;
}

/// Opens a pass on the caller's stream, and skips passes that only repeat the last ones.
void Simulator::open_pass() {
  if (options_.trace != nullptr || options_.each_micro_batch) return;
  if (!record_.open_pass(lanes_.now(), tasks_.pending())) return;
  const std::int64_t passes = caller_.passes_to_skip();
  if (passes <= 0) return;
  lanes_.skip(record_.skip(passes));
  caller_.skip(passes);
}

// -- what ends -------------------------------------------------------------------------------------------

void Simulator::pass_time() {
  const bool computes = lanes_.of(Lane::caller).running;
  const double seconds = lanes_.pass_time(record_.use());
  if (!computes && tasks_.pending_updates() > 0) record_.stand_still(seconds);
  lanes_.for_ended([this](Lane lane) { finish(lane); }, [this](InputCopies::Way way) { finish_input_copy(way); });
}

void Simulator::finish(Lane lane) {
  const Flight& flight = lanes_.of(lane);
  if (lane == Lane::caller) return finish_compute(flight);
  const Task& task = tasks_.graph().node(flight.id).task;
  if (options_.trace != nullptr && !settles_) {
    const std::string name = task.text(layer_at(layout_, task.layer).name);
    options_.trace->span(name_of(lane), name, std::max(0.0, flight.begin), lanes_.now(), task.bytes);
  }
  record_.add(task, lanes_.now() - flight.begin, tasks_.times(task));
  if (lane == Lane::disk) --saves_left_;
  const bool updates = is_update(task.kind);
  tasks_.done(flight.id);
  if (updates && tasks_.pending_updates() == 0) record_.end_updates(lanes_.now());
}

void Simulator::finish_compute(const Flight& flight) {
  record_.add_compute(lanes_.now() - flight.begin, lanes_.now());
  const Compute ended = caller_.end_compute();
  if (options_.trace != nullptr && !settles_) {
    const std::string name =
        fmt::format("{} {}", ended.backward ? "backward" : "forward", layer_at(layout_, ended.layer).name);
    options_.trace->span(name_of(Lane::caller), name, std::max(0.0, flight.begin), lanes_.now());
  }
  for (const TaskId id : ended.ends) tasks_.done(id);
}

void Simulator::finish_input_copy(InputCopies::Way way) {
  caller_.inputs().copied(way);
  if (options_.trace == nullptr || settles_) return;
  const char* name = way == InputCopies::Way::to_host ? "activations to host" : "activations to device";
  options_.trace->span(name, "input", lanes_.of(way).begin, lanes_.now(), plan_.offloaded_input_bytes);
}

}  // namespace tandem
