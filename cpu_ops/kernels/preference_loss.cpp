// Loss of pairs of sequences, of which one was preferred.
#include "core/numerics/preference.hpp"

#include "cpu_ops/kernels/kernels.hpp"

namespace tandem::fast {
namespace {

/// Sum of a sequence's losses, in the order of its tokens.
float sum_of(const float* losses, std::int64_t count) {
  double sum = 0.0;
  for (std::int64_t i = 0; i < count; ++i) sum += static_cast<double>(losses[i]);
  return static_cast<float>(sum);
}

}  // namespace

void preference_loss(Parallel& parallel, const PreferenceLoss& of) {
  const std::int64_t length = of.losses.shape[1];
  parallel.run(of.pairs.shape[0], [&](std::int64_t i) {
    const float* const losses = of.losses.as<float>() + 2 * i * length;
    const float* const reference = of.reference.as<float>() + 2 * i;
    const numerics::PreferencePair pair = numerics::preference_pair(
        {sum_of(losses, length), sum_of(losses + length, length), reference[0], reference[1]}, of.beta);
    float* const factors = of.sequence_factors.as<float>() + 2 * i;
    factors[0] = pair.slope;
    factors[1] = -pair.slope;
    float* const results = of.pairs.as<float>() + 3 * i;
    results[0] = pair.loss;
    results[1] = pair.chosen;
    results[2] = pair.rejected;
  });
}

}  // namespace tandem::fast
