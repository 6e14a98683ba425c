// Loss of pairs of sequences, of which one was preferred.
#include "core/numerics/preference.hpp"

#include "cpu_ops/kernels/kernels.hpp"

namespace tandem::fast {

void preference_loss(Parallel& parallel, const PreferenceLoss& of) {
  const std::int64_t length = of.losses.shape[1];
  parallel.run(of.pairs.shape[0], [&](std::int64_t i) {
    const float* const losses = of.losses.as<float>() + 2 * i * length;
    const float* const reference = of.reference.as<float>() + 2 * i;
    const numerics::PreferencePair pair =
        numerics::preference_pair({numerics::sum_of_losses(losses, length),
                                   numerics::sum_of_losses(losses + length, length), reference[0], reference[1]},
                                  of.beta);
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
