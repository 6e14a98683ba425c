#pragma once
// How a step is computed: what is kept of activations, and how many micro-batches pass through a layer at once.
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "models/transformer/transformer.hpp"
#include "scheduler/search/auto.hpp"
#include "train/config/config.hpp"

namespace tandem {

/// Makes it the next way of keeping activations that takes less device memory: compute norms and activations again,
/// then all blocks, then send their inputs to the host too. False where there is none, or the configuration names the
/// way.
bool keep_less(const TrainConfig& config, const ModelConfig& model, RunShape& shape) noexcept;

/// Whether there is a plan of that shape.
using ShapeFits = std::function<bool(const RunShape& shape)>;
/// The fewest blocks that must be computed again for the shape to fit; all of them where it does not fit with fewer.
/// More of them never take more memory.
std::int64_t fewest_recomputed(const ModelConfig& model, RunShape shape, const ShapeFits& fits);

/// Numbers of micro-batches that may pass through a layer at once instead of one after another, most first; empty where
/// the configuration leaves no choice, or a step has but one.
std::vector<std::int64_t> more_at_once(const TrainConfig& config, const RunShape& shape);
/// The plan's order of micro-batches and why it is that one, in words; empty where there is one micro-batch.
std::string order_text(const Plan& plan, std::string_view why);
/// Reasons: that the configuration says so, or that several at once do not fit.
constexpr std::string_view as_asked = "as --accumulation-order says";
constexpr std::string_view one_does_not_fit = "one at a time does not fit";
constexpr std::string_view none_fit = "more than one at once do not fit";

struct FastestShape {
  RunShape shape;
  std::vector<LayerSeconds> compute;
  Choice choice;
  std::string why;  ///< reason for this number of micro-batches at once; empty: nothing crosses the link for each
};

/// Facts about a machine, asked shape by shape.
struct ShapeMachine {
  /// Seconds of a micro-batch, layer by layer.
  std::function<std::vector<LayerSeconds>(const RunShape& shape)> compute;
  ShapeFits fits;
  /// Chooses the plan of a step, or gives up where none is faster than so many seconds. Throws PlanError.
  std::function<Choice(const RunShape& shape, std::span<const LayerSeconds> compute, double faster_than)> choose;
};

/// The predicted fastest, from `shape`, which keeps most and has one micro-batch at once, to what keeps least: with
/// nothing computed again, norms and activations, all blocks, and with their inputs on the host, then with some numbers
/// of blocks between, of whose others norms and activations are computed again. What computes for longer than another's
/// step takes is not looked at. Of numbers of micro-batches at once it tries the largest that fits, then fewer until
/// those are no faster. Throws PlanError, of the shape that needs least, where none fits.
FastestShape fastest_shape(const TrainConfig& config, const ModelConfig& model, RunShape shape,
                           const ShapeMachine& machine);

}  // namespace tandem
