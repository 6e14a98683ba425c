#include "train/setup/fastest_shape.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "core/base/error.hpp"

namespace tandem {
namespace {

bool faster(const Choice& a, const Choice& b) {
  return !a.simulation.given_up && a.simulation.step_seconds < b.simulation.step_seconds;
}

std::string predicted_gain(const Simulation& more, const Simulation& one) {
  if (more.given_up) return fmt::format("predicted no faster than {:.4g} s/step", more.step_seconds);
  return fmt::format("predicted {:.4g} s/step instead of {:.4g}", more.step_seconds, one.step_seconds);
}

class Search {
 public:
  Search(const TrainConfig& config, const ModelConfig& model, const ShapeMachine& machine)
      : config_(config), model_(model), machine_(machine) {}

  /// Throws PlanError where none fits.
  FastestShape fastest(const RunShape& first);

 private:
  void try_ways(RunShape shape);
  void try_some_blocks(RunShape shape);
  void try_blocks(RunShape shape, std::int64_t blocks);
  void look_at(const RunShape& shape);
  FastestShape planned(const RunShape& shape, std::vector<LayerSeconds> layers, double faster_than) const;
  std::optional<FastestShape> several_at_once(RunShape shape, double faster_than) const;
  FastestShape in_better_order(const RunShape& shape, std::vector<LayerSeconds> layers, double faster_than) const;
  double compute_of_step(std::span<const LayerSeconds> layers) const {
    return seconds_of_step(layers, config_.grad_accum);
  }
  double best_seconds() const {
    return best_ ? best_->choice.simulation.step_seconds : std::numeric_limits<double>::infinity();
  }

  const TrainConfig& config_;
  const ModelConfig& model_;
  const ShapeMachine& machine_;
  std::optional<FastestShape> best_;
};

FastestShape Search::planned(const RunShape& shape, std::vector<LayerSeconds> layers, double faster_than) const {
  Choice choice = machine_.choose(shape, layers, faster_than);
  return {shape, std::move(layers), std::move(choice), {}};
}

/// The fastest with several micro-batches at once; none where none fit.
std::optional<FastestShape> Search::several_at_once(RunShape shape, double faster_than) const {
  std::optional<FastestShape> best;
  for (const std::int64_t at_once : more_at_once(config_, shape)) {
    shape.micro_batches = at_once;
    try {
      const double limit = best ? std::min(faster_than, best->choice.simulation.step_seconds) : faster_than;
      FastestShape way = planned(shape, machine_.compute(shape), limit);
      if (best && !faster(way.choice, best->choice)) break;
      best = std::move(way);
    } catch (const PlanError&) {  // fewer may fit
      continue;
    }
  }
  return best;
}

/// Shape for one way of keeping activations, in the better order of micro-batches.
FastestShape Search::in_better_order(const RunShape& shape, std::vector<LayerSeconds> layers,
                                     double faster_than) const {
  std::optional<FastestShape> first;
  try {
    first = planned(shape, std::move(layers), faster_than);
  } catch (const PlanError&) {  // sums of gradients on the host may be what is too much
    first = several_at_once(shape, faster_than);
    if (!first) throw;
    first->why = one_does_not_fit;
    return *std::move(first);
  }
  FastestShape& one = *first;
  if (config_.accumulation_order != AccumulationOrder::automatic) one.why = as_asked;
  const Plan& plan = one.choice.plan;
  if (!plan.streams_weights() && !plan.sends_gradients()) return std::move(one);
  const double limit = std::min(faster_than, one.choice.simulation.step_seconds);
  std::optional<FastestShape> more = several_at_once(shape, limit);
  if (!more) {
    if (!more_at_once(config_, shape).empty()) one.why = none_fit;
    return std::move(one);
  }
  const std::string gain = predicted_gain(more->choice.simulation, one.choice.simulation);
  more->why = gain;
  one.why = "by layer: " + gain;
  return faster(more->choice, one.choice) ? *std::move(more) : std::move(one);
}

/// Throws PlanError where it does not fit.
void Search::look_at(const RunShape& shape) {
  std::vector<LayerSeconds> layers = machine_.compute(shape);
  if (compute_of_step(layers) >= best_seconds()) return;
  FastestShape way = in_better_order(shape, std::move(layers), best_seconds());
  if (!best_ || faster(way.choice, best_->choice)) best_ = std::move(way);
}

/// Tries the ways of keeping activations, without numbers of blocks between none and all.
void Search::try_ways(RunShape shape) {
  do {
    try {
      look_at(shape);
    } catch (const PlanError&) {
      RunShape less = shape;
      if (!best_ && !keep_less(config_, model_, less)) throw;
    }
  } while (keep_less(config_, model_, shape));
}

/// More blocks computed again give memory to weights and state, which can save what of the step is no computing. Where
/// saving half of it would not be enough, they are not looked at.
void Search::try_blocks(RunShape shape, std::int64_t blocks) {
  shape.recomputed_blocks = blocks;
  const double waits = best_seconds() - compute_of_step(best_->compute);
  if (compute_of_step(machine_.compute(shape)) >= best_seconds() - 0.5 * waits) return;
  look_at(shape);
}

/// Each block that keeps its activations saves a forward and takes memory that state or weights could have. The step
/// over the number of blocks is a valley, with noise: from the best so far half the way, then a quarter.
void Search::try_some_blocks(RunShape shape) {
  shape.selective = true;  // such a block takes two thirds of the memory, and runs no product again
  const std::int64_t all = model_.layers, fewest = fewest_recomputed(model_, shape, machine_.fits);
  if (fewest > 0 && fewest < all) try_blocks(shape, fewest);
  for (const std::int64_t step : {(all - fewest) / 2, (all - fewest) / 4}) {
    const std::int64_t best = best_->shape.recomputed_blocks;
    for (const std::int64_t blocks : {best - step, best + step}) {
      if (step > 0 && blocks > fewest && blocks < all) try_blocks(shape, blocks);
    }
  }
}

FastestShape Search::fastest(const RunShape& first) {
  try_ways(first);
  if (first.training && !config_.recompute && !first.offload_inputs) try_some_blocks(first);
  return *std::move(best_);
}

}  // namespace

FastestShape fastest_shape(const TrainConfig& config, const ModelConfig& model, RunShape shape,
                           const ShapeMachine& machine) {
  return Search(config, model, machine).fastest(shape);
}

bool keep_less(const TrainConfig& config, const ModelConfig& model, RunShape& shape) noexcept {
  if (!shape.training || config.recompute || shape.offload_inputs) return false;
  const bool all_recomputed = shape.recomputed_blocks == model.layers;
  const bool all_kept = shape.recomputed_blocks == 0 && !shape.selective;
  shape.selective = all_kept;
  shape.offload_inputs = all_recomputed;
  if (!all_kept) shape.recomputed_blocks = model.layers;
  return true;
}

std::int64_t fewest_recomputed(const ModelConfig& model, RunShape shape, const ShapeFits& fits) {
  std::int64_t too_few = -1, enough = model.layers;
  while (enough - too_few > 1) {
    shape.recomputed_blocks = too_few + (enough - too_few) / 2;
    (fits(shape) ? enough : too_few) = shape.recomputed_blocks;
  }
  return enough;
}

std::string order_text(const Plan& plan, std::string_view why) {
  if (plan.max_micro_batches == 1) return {};
  return why.empty() ? plan.order() : fmt::format("{} ({})", plan.order(), why);
}

std::vector<std::int64_t> more_at_once(const TrainConfig& config, const RunShape& shape) {
  std::vector<std::int64_t> counts;
  if (!shape.training || config.accumulation_order != AccumulationOrder::automatic) return counts;
  for (std::int64_t n = config.grad_accum; n > 1; n = (n + 1) / 2) {
    if (n <= max_tokens / (shape.batch * shape.sequence)) counts.push_back(n);
  }
  return counts;
}

}  // namespace tandem
