#include "train/setup/run_plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <utility>

#include "core/device/cuda_memory.hpp"
#include "core/base/error.hpp"
#include "core/device/device_name.hpp"
#include "offload/engine/state_io.hpp"
#include "scheduler/plan/indices.hpp"
#include "scheduler/plan/link_codes.hpp"
#include "scheduler/plan/plan_builder.hpp"
#include "scheduler/plan/rank_slice.hpp"
#include "scheduler/search/replan.hpp"
#include "scheduler/tasks/traffic.hpp"
#include "train/setup/fastest_shape.hpp"
#include "train/setup/host_rows.hpp"
#include "train/setup/performance.hpp"
#include "train/setup/reference_choice.hpp"
#include "train/setup/run_request.hpp"

namespace tandem {
namespace {

/// A shape with its plan.
struct ShapePlan {
  RunShape shape;
  std::size_t activation_bytes = 0;
  OffloadOptions options{};
  Plan plan{};
  std::vector<LayerSeconds> compute{};  ///< empty where rates are not known
  std::optional<Choice> choice{};       ///< empty where rates are not known
  std::string why{};                    ///< this many micro-batches pass through a layer at once
};

/// Plans one rank's part of a run.
class RunPlanner {
 public:
  RunPlanner(const TrainConfig& config, const ModelConfig& model, const RunPurpose& purpose, const RunMachine& machine,
             Rank rank)
      : config_(config), purpose_(purpose), machine_(machine) {
    run_.model_config = model;
    run_.facts = machine.facts;
    run_.options = offload_options(config);
    run_.options.rank = rank;
    run_.batch_slots = purpose.training ? static_cast<std::size_t>(config.grad_accum) : 1;
    if (machine.processes > 1) ++run_.batch_slots;  // for those of other processes, which are drawn and counted
    run_.shape = run_shape(config, model, compute_type(config, machine.device_kind), purpose.training);
    run_.shape.cached = purpose.cached;
    if (purpose.cached > 0) run_.shape.fp8.reset();
    if (run_.shape.fp8 && !machine.ops->has_fp8()) {
      throw DeviceError("--compute fp8",
                        "this GPU multiplies no eight-bit factors; Ada (compute capability 8.9), Hopper "
                        "and later ones do",
                        "use --compute bf16");
    }
    if (purpose.training && config.objective == Objective::dpo) plan_reference();
    run_.layout = purpose.training ? training_layout(config, model, run_.shape) : forward_layout(model);
    rows_ = host_rows(run_, purpose, machine);
  }

  RunPlan planned() {
    take(machine_.profile ? fastest() : first_that_fits());
    if (run_.reference && run_.prediction) predict_reference(*run_.reference);
    if (run_.may_replan()) {
      book_room_for_change(run_.plan, run_.layout, run_.options, run_.facts);
    }
    book(run_);
    for (int rank = 1; rank < run_.options.rank.count; ++rank) run_.other_ranks.push_back(of_rank(rank));
    if (purpose_.saves && purpose_.training) {
      run_.checkpoints = checkpoint_space(config_, run_.layout, run_.saved_state());
    }
    if (purpose_.saves && config_.checkpoint_every > 0) book_saving();
    return std::move(run_);
  }

  /// Throws PlanError, of what needs least, where no policy fits in any way of keeping activations.
  void require_fit() const {
    RunShape shape = run_.shape;
    do {
      std::vector<std::int64_t> orders = more_at_once(config_, shape);
      orders.push_back(shape.micro_batches);  // the last: what keeps less is of that order, and so is a refusal
      for (const std::int64_t at_once : orders) {
        RunShape tried = shape;
        tried.micro_batches = at_once;
        if (some_policy_fits(run_.layout, without_plan(tried).options, run_.facts)) return;
      }
    } while (keep_less(config_, run_.model_config, shape));
    static_cast<void>(with_plan(shape));
  }

 private:
  // -- reference of DPO ------------------------------------------------------------------------------------------

  void plan_reference() {
    ReferencePlan& reference = run_.reference.emplace();
    reference.in_step = run_.shape.reference_in_step;
    const SequenceFacts& records = config_.sequences;
    reference.bytes =
        static_cast<std::size_t>(records.held_out + (reference.in_step ? 0 : records.scored)) * sizeof(float);
    reference.text = reference.in_step    ? "in each step"
                     : records.has_scores ? "beside the data"
                                          : "before the first step";
  }

  void predict_reference(ReferencePlan& reference) const {
    if (reference.in_step || config_.sequences.has_scores) return;
    const auto passes = static_cast<double>(reference_work(config_, run_.options.rank.count).passes);
    reference.before_seconds = passes * scoring_seconds();
    reference.text += fmt::format(": predicted {:.4g} s", *reference.before_seconds);
  }

  /// Seconds of a forward pass that ends in losses: of computing, or where they take longer of copies of weights.
  double scoring_seconds() const {
    RunShape shape = run_.shape, with_reference = shape;
    shape.micro_batches = with_reference.micro_batches = 1;
    with_reference.reference_in_step = true;
    const std::vector<LayerSeconds> layers = compute_of(shape);
    double computing = compute_of(with_reference).back().backward - layers.back().backward;  // the head's
    for (const LayerSeconds& layer : layers) computing += layer.forward;
    double bytes = 0.0;
    for (const LayerIndex l : layers_of(run_.layout)) {
      const LayerPlacement& placed = placement_at(run_.plan, l);
      if (placed.resident) continue;
      bytes += static_cast<double>(fetched_bytes(layer_at(run_.layout, l), placed, run_.options.rank));
    }
    return std::max(computing, bytes / machine_.profile->to_device.value);
  }

  // -- shapes ----------------------------------------------------------------------------------------------------

  std::vector<ActivationEntry> model_memory(const RunShape& shape) const {
    return Transformer(run_.model_config, shape).memory(*machine_.ops);
  }

  /// Pinned memory that is not the plan's.
  std::size_t pinned_bytes(const std::vector<ActivationEntry>& entries) const {
    std::size_t bytes = rows_.batches + rows_.staging;
    for (const ActivationEntry& entry : entries) {
      if (entry.place == Place::pinned) bytes += align_up(entry.bytes);
    }
    return bytes;
  }

  ShapePlan without_plan(const RunShape& shape) const {
    ShapePlan made{.shape = shape, .options = run_.options};
    const std::vector<ActivationEntry> entries = model_memory(shape);
    std::size_t on_host = 0;
    for (const ActivationEntry& entry : entries) {
      (entry.place == Place::device ? made.activation_bytes : on_host) += align_up(entry.bytes);
    }
    made.options.reserved_device_memory =
        made.activation_bytes + connection_bytes() + page_table_bytes(pinned_bytes(entries), run_.facts, run_.options.rank);
    made.options.reserved_host_memory = rows_.total() + on_host;
    set_shape(made.options, run_.model_config, shape);
    return made;
  }

  ShapePlan with_plan(const RunShape& shape) const {
    ShapePlan made = without_plan(shape);
    made.plan = make_plan(run_.layout, made.options, run_.facts);
    return made;
  }

  /// Bytes that the library which connects GPUs of several processes takes of each, beside what is planned.
  std::size_t connection_bytes() const {
    return machine_.processes > 1 && machine_.device_kind == "cuda" ? assumed_nccl_bytes : 0;
  }

  bool fits(const RunShape& shape) const {
    return find_plan(run_.layout, without_plan(shape).options, run_.facts).has_value();
  }

  std::vector<LayerSeconds> compute_of(const RunShape& shape) const {
    std::vector<LayerSeconds> compute =
        compute_seconds(*machine_.profile, work_of(run_.model_config, shape, config_.sequences, &run_.layout));
    for (LayerSeconds& s : compute) {
      s = {s.forward * machine_.slower.forward, s.backward * machine_.slower.backward};
    }
    return compute;
  }

  // -- choices ---------------------------------------------------------------------------------------------------

  /// The predicted fastest. Throws PlanError.
  ShapePlan fastest() const {
    ShapeMachine machine;
    machine.compute = [this](const RunShape& shape) { return compute_of(shape); };
    machine.fits = [this](const RunShape& shape) { return fits(shape); };
    machine.choose = [this](const RunShape& shape, std::span<const LayerSeconds> layers, double faster_than) {
      return choose_plan(run_.layout, without_plan(shape).options, run_.facts, *machine_.profile, layers,
                         {.faster_than = faster_than});
    };
    FastestShape best = fastest_shape(config_, run_.model_config, run_.shape, machine);
    ShapePlan made = without_plan(best.shape);
    made.plan = best.choice.plan;
    made.compute = std::move(best.compute);
    made.choice = std::move(best.choice);
    made.why = std::move(best.why);
    return made;
  }

  /// Bytes across the link in a step of the steady state.
  std::uint64_t bytes_of_step(const Plan& plan) const {
    const Traffic traffic = traffic_of_step(run_.layout, plan, plan.max_micro_batches);
    return traffic.host_to_device + traffic.device_to_host;
  }

  /// Plan with `count` micro-batches through each layer at once; none where they do not fit.
  std::optional<ShapePlan> several_at_once(RunShape shape, std::int64_t count) const {
    shape.micro_batches = count;
    try {
      return with_plan(shape);
    } catch (const PlanError&) {
      return {};
    }
  }

  /// Plan with as many micro-batches through each layer at once as fit, where one at a time does not, or where
  /// something crosses the link for each of them and fewer bytes do so. Throws PlanError.
  ShapePlan order_by_bytes(const RunShape& shape) const {
    std::optional<ShapePlan> one;
    try {
      one = with_plan(shape);
    } catch (const PlanError&) {  // sums of gradients on the host may be what is too much
      for (const std::int64_t count : more_at_once(config_, shape)) {
        one = several_at_once(shape, count);
        if (!one) continue;
        one->why = one_does_not_fit;
        return *std::move(one);
      }
      throw;
    }
    if (config_.accumulation_order != AccumulationOrder::automatic) one->why = as_asked;
    if (!purpose_.predicts || !(one->plan.streams_weights() || one->plan.sends_gradients())) return *std::move(one);
    for (const std::int64_t count : more_at_once(config_, shape)) {
      std::optional<ShapePlan> more = several_at_once(shape, count);
      if (!more) {
        one->why = none_fit;  // or fewer do
        continue;
      }
      const std::uint64_t bytes = bytes_of_step(more->plan), before = bytes_of_step(one->plan);
      const std::string gain =
          fmt::format("{} across the link instead of {}", format_bytes(bytes), format_bytes(before));
      more->why = gain;
      one->why = "by layer: " + gain;
      return *std::move(bytes < before ? more : one);
    }
    return *std::move(one);
  }

  /// The way of keeping activations that keeps most of those that fit. Throws PlanError, of the way that needs least,
  /// where none does.
  ShapePlan first_that_fits() const {
    const ModelConfig& model = run_.model_config;
    const ShapeFits fitting = [this](const RunShape& s) { return fits(s); };
    RunShape shape = run_.shape;
    while (!fitting(shape) && keep_less(config_, model, shape)) {
    }
    if (!config_.recompute && !shape.offload_inputs && shape.recomputed_blocks > 0) {
      shape.selective = true;
      shape.recomputed_blocks = fewest_recomputed(model, shape, fitting);
    }
    return order_by_bytes(shape);
  }

  // -- the plan --------------------------------------------------------------------------------------------------

  void take(ShapePlan made) {
    run_.shape = made.shape;
    run_.activation_bytes = made.activation_bytes;
    run_.options = made.options;
    run_.plan = std::move(made.plan);
    if (run_.shape.training) run_.order = order_text(run_.plan, made.why);
    if (made.choice) run_.prediction = {*machine_.profile, std::move(made.compute), *std::move(made.choice)};
  }

  void book(RunPlan& run) const {
    const std::vector<ActivationEntry> entries = model_memory(run.shape);
    run.memory = run.plan.memory;
    for (const ActivationEntry& entry : entries) run.memory.add(entry.name, "run", entry.place, entry.bytes);
    run.memory.add("device context and libraries", "run", Place::device, run.facts.device_reserved);
    run.page_tables = run.plan.page_tables + page_table_bytes(pinned_bytes(entries), run.facts, run.options.rank);
    run.memory.add("page tables of pinned memory", "run", Place::device, run.page_tables);
    if (connection_bytes() > 0) run.memory.add("connections of GPUs", "run", Place::device, connection_bytes());
    rows_.add_to(run.memory);
  }

  RunPlan of_rank(int index) const {
    RunPlan other;
    other.model_config = run_.model_config;
    other.shape = run_.shape;
    other.layout = run_.layout;
    other.options = run_.options;
    other.options.rank = {index, run_.options.rank.count};
    other.facts = run_.facts;
    other.plan = plan_of_rank(other.layout, other.options, run_.plan);
    other.activation_bytes = run_.activation_bytes;
    other.batch_slots = run_.batch_slots;
    book(other);
    return other;
  }

  /// A copy of the state, so that no update waits while it is written, where there is room for it. Each rank books its
  /// part of what the process has once. With several processes there is none: rank 0 would hold all state.
  void book_copy() {
    if (machine_.processes > 1) return;
    const std::size_t copy = part_of_rank(
        StateCopy::bytes(run_.layout, optimizer_of(run_.options.state), run_.saved_state()), run_.options.rank);
    PlanningFacts facts = run_.facts;
    // Without a ceiling a margin is left for everybody else.
    if (!run_.options.host_memory) facts.host_available -= facts.host_available / 10;
    const auto with_copy = [&](MemoryPlan memory) {
      std::erase_if(memory.entries, [](const MemoryEntry& e) { return e.name == "checkpoint buffer"; });
      memory.add("checkpoint copy", "run", Place::pageable, copy);
      return memory;
    };
    MemoryPlan first = with_copy(run_.memory);
    if (over_host_memory(run_.options, facts, first.host_bytes(), first.device_bytes()) > 0) return;
    run_.memory = std::move(first);
    for (RunPlan& other : run_.other_ranks) other.memory = with_copy(std::move(other.memory));
    run_.saving.copies = true;
  }

  void book_saving() {
    run_.saving.every = config_.checkpoint_every;
    run_.saving.saved = run_.saved_state();
    book_copy();
    if (!run_.prediction) return;
    const RunPrediction& known = *run_.prediction;
    run_.saving.slowdown = predict_saving(run_.saving, run_.layout, run_.plan, known.profile, known.compute);
  }

  const TrainConfig& config_;  ///< configuration of one rank
  const RunPurpose& purpose_;
  const RunMachine& machine_;
  HostRows rows_;
  RunPlan run_;
};

/// Planner of the first rank, which has the others' plans too.
RunPlanner planner_of(const TrainConfig& of_rank, const TrainConfig& of_all, const ModelConfig& model,
                      const RunPurpose& purpose, const RunMachine& machine) {
  return RunPlanner(of_rank, model, purpose, machine, {0, ranks_of(of_all, machine.processes)});
}

}  // namespace

RunPlan plan_run(const TrainConfig& of_all, const ModelConfig& model, const RunPurpose& purpose,
                 const RunMachine& machine) {
  const TrainConfig config = config_of_rank(of_all, machine.processes);
  const auto planned = [&](const TrainConfig& c) { return planner_of(c, of_all, model, purpose, machine).planned(); };
  if (!purpose.training || !chooses_reference(config, model)) return planned(config);
  return cheaper_reference(config, ranks_of(of_all, machine.processes), planned);
}

void require_fit(const TrainConfig& of_all, const ModelConfig& model, const RunPurpose& purpose,
                 const RunMachine& machine) {
  const TrainConfig config = config_of_rank(of_all, machine.processes);
  planner_of(config, of_all, model, purpose, machine).require_fit();
}

}  // namespace tandem
