#include "core/numerics/dropout.hpp"

#include "cpu_ops/kernels/elements.hpp"
#include "cpu_ops/kernels/kernels.hpp"

namespace tandem::fast {
namespace {

/// Elements that a thread takes at once, and those whose random words it holds.
constexpr std::int64_t at_once = 16 * 1024, in_words = 256;

/// Elements [begin, begin + length) of y, whose random words lie in `words`.
template <class T>
void apply(const T* x, T* y, const std::uint32_t* words, std::int64_t length, numerics::DropoutRule rule,
           bool accumulate) {
  if (accumulate) {
#pragma GCC ivdep
    for (std::int64_t i = 0; i < length; ++i) {
      y[i] = from_float<T>(numerics::add(to_float(y[i]), numerics::dropped(to_float(x[i]), words[i], rule)));
    }
  } else {
#pragma GCC ivdep
    for (std::int64_t i = 0; i < length; ++i) y[i] = from_float<T>(numerics::dropped(to_float(x[i]), words[i], rule));
  }
}

}  // namespace

void dropout(Parallel& parallel, TensorView x, const Dropout& of, TensorView y, bool accumulate) {
  constexpr auto per_block = static_cast<std::int64_t>(numerics::dropout_block);
  const numerics::DropoutRule rule = numerics::dropout_rule(of.rate);
  with_activation(x.dtype, [&]<class T>(T) {
    const T* const from = x.as<T>();
    T* const to = y.as<T>();
    for_ranges(parallel, x.count(), at_once, [=](std::int64_t begin, std::int64_t length) {
      vectorised([=] {
        // One block more than the elements fill, as the first of them may lie within a block.
        std::uint32_t words[in_words + per_block];
        for (std::int64_t at = begin; at < begin + length; at += in_words) {
          const std::uint64_t number = of.first + static_cast<std::uint64_t>(at);
          const std::uint64_t first = number / numerics::dropout_block;
          for (std::int64_t b = 0; b <= in_words / per_block; ++b) {
            const auto bits = numerics::dropout_bits(of.seed, of.stream, first + static_cast<std::uint64_t>(b));
            for (std::int64_t w = 0; w < per_block; ++w) words[b * per_block + w] = bits.word[w];
          }
          apply(from + at, to + at, words + number % numerics::dropout_block, std::min(in_words, begin + length - at),
                rule, accumulate);
        }
      });
    });
  });
}

}  // namespace tandem::fast
