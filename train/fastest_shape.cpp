#include "train/fastest_shape.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "core/error.hpp"

namespace tandem {
namespace {

bool faster(const Choice& a, const Choice& b) {
  return !a.simulation.given_up && a.simulation.step_seconds < b.simulation.step_seconds;
}

std::string predicted_gain(const Simulation& more, const Simulation& one) {
  if (more.given_up) return fmt::format("predicted no faster than {:.4g} s/step", more.step_seconds);
  return fmt::format("predicted {:.4g} s/step instead of {:.4g}", more.step_seconds, one.step_seconds);
}

/// What of a search does not change from shape to shape.
struct Search {
  const TrainConfig& config;
  const ComputeOfShape& compute;
  const ChooseForShape& choose;

  FastestShape planned(const RunShape& shape, std::vector<LayerSeconds> layers, double faster_than) const;
  std::optional<FastestShape> several_at_once(RunShape shape, double faster_than) const;
  FastestShape in_better_order(const RunShape& shape, std::vector<LayerSeconds> layers, double faster_than) const;
};

FastestShape Search::planned(const RunShape& shape, std::vector<LayerSeconds> layers, double faster_than) const {
  Choice choice = choose(shape, layers, faster_than);
  return {shape, std::move(layers), std::move(choice), {}};
}

/// The fastest with several micro-batches at once; none where none fit.
std::optional<FastestShape> Search::several_at_once(RunShape shape, double faster_than) const {
  std::optional<FastestShape> best;
  for (const std::int64_t at_once : more_at_once(config, shape)) {
    shape.micro_batches = at_once;
    try {
      const double limit = best ? std::min(faster_than, best->choice.simulation.step_seconds) : faster_than;
      FastestShape way = planned(shape, compute(shape), limit);
      if (best && !faster(way.choice, best->choice)) break;
      best = std::move(way);
    } catch (const PlanError&) {  // fewer may fit
      continue;
    }
  }
  return best;
}

/// For one way of keeping activations, in the better order of micro-batches.
FastestShape Search::in_better_order(const RunShape& shape, std::vector<LayerSeconds> layers,
                                     double faster_than) const {
  FastestShape one = planned(shape, std::move(layers), faster_than);
  if (config.accumulation_order != AccumulationOrder::automatic) one.why = as_asked;
  const Plan& plan = one.choice.plan;
  if (!plan.streams_weights() && !plan.sends_gradients()) return one;
  const double limit = std::min(faster_than, one.choice.simulation.step_seconds);
  std::optional<FastestShape> more = several_at_once(shape, limit);
  if (!more) {
    if (!more_at_once(config, shape).empty()) one.why = none_fit;
    return one;
  }
  const std::string gain = predicted_gain(more->choice.simulation, one.choice.simulation);
  more->why = gain;
  one.why = "by layer: " + gain;
  return faster(more->choice, one.choice) ? *std::move(more) : one;
}

}  // namespace

FastestShape fastest_shape(const TrainConfig& config, RunShape shape, const ComputeOfShape& compute,
                           const ChooseForShape& choose) {
  const Search search{config, compute, choose};
  std::optional<FastestShape> best;
  do {
    const double seconds = best ? best->choice.simulation.step_seconds : std::numeric_limits<double>::infinity();
    std::vector<LayerSeconds> layers = compute(shape);
    if (seconds_of_step(layers, config.grad_accum) >= seconds) continue;
    try {
      FastestShape way = search.in_better_order(shape, std::move(layers), seconds);
      if (!best || faster(way.choice, best->choice)) best = std::move(way);
    } catch (const PlanError&) {
      RunShape less = shape;
      if (!best && !keep_less(config, less)) throw;
    }
  } while (keep_less(config, shape));
  return *std::move(best);
}

bool keep_less(const TrainConfig& config, RunShape& shape) noexcept {
  if (!shape.training || config.recompute != Recompute::automatic || shape.offload_inputs) return false;
  (shape.recompute ? shape.offload_inputs : shape.recompute) = true;
  return true;
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
