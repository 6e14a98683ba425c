// Dropout: one pass over memory, in place where core/ops/ops.hpp allows; the bits of core/numerics/dropout.hpp.
#include "core/numerics/dropout.hpp"

#include "gpu_ops/base/kernels.hpp"
#include "gpu_ops/base/launch.hpp"
#include "gpu_ops/kernels/elements.hpp"

namespace tandem::gpu {
namespace {

struct DropoutBits {
  std::uint64_t seed, stream, first;
  numerics::DropoutRule rule;
};

constexpr int words = static_cast<int>(numerics::dropout_block);

struct PacketWords {
  std::uint32_t word[packet];
};

/// Random words of a packet of elements, which begins anywhere in a block of them.
TANDEM_DEVICE PacketWords draw(const DropoutBits& bits, std::int64_t at) {
  const std::uint64_t number = bits.first + static_cast<std::uint64_t>(at);
  const std::uint64_t block = number / numerics::dropout_block;
  const auto within = static_cast<int>(number % numerics::dropout_block);
  numerics::Philox128 drawn[packet / words + 1] = {};
  TANDEM_UNROLL
  for (int b = 0; b <= packet / words; ++b) {
    if (b < packet / words || within > 0) {
      drawn[b] = numerics::dropout_bits(bits.seed, bits.stream, block + static_cast<std::uint64_t>(b));
    }
  }
  PacketWords result;
  TANDEM_UNROLL
  for (int i = 0; i < packet; ++i) {
    // Indices that are known when it is compiled, so that all stay in registers.
    TANDEM_UNROLL
    for (int shift = 0; shift < words; ++shift) {
      if (shift == within) result.word[i] = drawn[(i + shift) / words].word[(i + shift) % words];
    }
  }
  return result;
}

template <class T>
TANDEM_KERNEL(most_threads)
dropout_kernel(const T* x, DropoutBits bits, T* y, bool accumulate, std::int64_t count, bool aligned) {
  for_spans(count, aligned, [&](const Span& span) {
    Floats p = load(x, span), before = {};
    if (accumulate) before = load(y, span);
    const PacketWords random = draw(bits, span.at);
    for (int i = 0; i < packet; ++i) {
      p.x[i] = numerics::dropped(p.x[i], random.word[i], bits.rule);
      if (accumulate) p.x[i] = numerics::add(before.x[i], p.x[i]);
    }
    store(y, span, p);
  });
}

}  // namespace

void dropout(TensorView x, const Dropout& of, TensorView y, bool accumulate, CUstream_st* stream) {
  const DropoutBits bits{of.seed, of.stream, of.first, numerics::dropout_rule(of.rate)};
  with_activation(x.dtype, [&]<class T>(T) {
    launch("dropout", dropout_kernel<T>, pointwise_geometry(x.count()), stream, x.as<T>(), bits, y.as<T>(), accumulate,
           x.count(), aligned(x.data, y.data));
  });
}

}  // namespace tandem::gpu
