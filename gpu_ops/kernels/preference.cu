// Loss of pairs of sequences, of which one was preferred: a block for each pair.
#include "core/numerics/preference.hpp"

#include "gpu_ops/base/kernels.hpp"
#include "gpu_ops/base/launch.hpp"
#include "gpu_ops/kernels/elements.hpp"

namespace tandem::gpu {
namespace {

constexpr int side = most_threads / 2;  ///< threads that bring one sequence's losses

/// Operands of PreferenceLoss.
struct Pairs {
  const float* losses;
  const float* reference;
  float* factors;
  float* results;
  std::int64_t count, length;
  float beta;
};

/// All threads bring losses, and one for each sequence adds them in the order of tokens: sums of the host's bits.
TANDEM_KERNEL(most_threads)
preference_loss_kernel(Pairs p) {
  // Two halves in turn, so that one barrier each is enough: who writes to one has passed the barrier of the other.
  TANDEM_SHARED(float, room, 2 * most_threads);
  TANDEM_SHARED(float, sums, 2);
  const int own = thread_index() / side, place = thread_index() % side;
  int turn = 0;
  for (std::int64_t pair = block_index(); pair < p.count; pair += grid_size()) {
    const float* const losses = p.losses + (2 * pair + own) * p.length;
    double sum = 0.0;
    for (std::int64_t first = 0; first < p.length; first += side) {
      float* const half = room + turn * most_threads;
      turn = 1 - turn;
      if (first + place < p.length) half[thread_index()] = losses[first + place];
      barrier();
      const std::int64_t left = p.length - first, count = left < side ? left : side;
      for (int i = 0; place == 0 && i < count; ++i) sum += static_cast<double>(half[own * side + i]);
    }
    if (place == 0) sums[own] = static_cast<float>(sum);
    barrier();
    if (thread_index() == 0) {
      const float* const reference = p.reference + 2 * pair;
      const numerics::PreferencePair made =
          numerics::preference_pair({sums[0], sums[1], reference[0], reference[1]}, p.beta);
      p.factors[2 * pair] = made.slope;
      p.factors[2 * pair + 1] = -made.slope;
      p.results[3 * pair] = made.loss;
      p.results[3 * pair + 1] = made.chosen;
      p.results[3 * pair + 2] = made.rejected;
    }
  }
}

}  // namespace

void preference_loss(const PreferenceLoss& of, CUstream_st* stream) {
  const Pairs pairs{of.losses.as<float>(),
                    of.reference.as<float>(),
                    of.sequence_factors.as<float>(),
                    of.pairs.as<float>(),
                    of.pairs.shape[0],
                    of.losses.shape[1],
                    of.beta};
  launch("preference_loss", preference_loss_kernel, Geometry{blocks_for(pairs.count, 1), most_threads}, stream, pairs);
}

}  // namespace tandem::gpu
