// Matrices of eight-bit floating point. Here their elements lie as the numbers that the codes stand for, which bf16
// holds exactly: a product of such matrices is one of bf16.
#include <algorithm>
#include <atomic>

#include "core/numerics/fp8_scale.hpp"
#include "cpu_ops/kernels/elements.hpp"
#include "cpu_ops/kernels/kernels.hpp"

namespace tandem::fast {
namespace {

/// Elements that a thread takes at once.
constexpr std::int64_t at_once = 64 * 1024;

template <class T>
std::uint32_t largest_magnitude(Parallel& parallel, const T* x, std::int64_t count) {
  std::atomic<std::uint32_t> largest{0};
  for_ranges(parallel, count, at_once, [x, &largest](std::int64_t begin, std::int64_t length) {
    std::uint32_t of_range = 0;
    vectorised([from = x + begin, length, to = &of_range] {
      std::uint32_t seen = 0;
      for (std::int64_t i = 0; i < length; ++i) seen = std::max(seen, numerics::fp8_magnitude(from[i]));
      *to = seen;
    });
    std::uint32_t known = largest.load();
    while (known < of_range && !largest.compare_exchange_weak(known, of_range)) {
    }
  });
  return largest.load();
}

template <class Format, class T>
void round_elements(Parallel& parallel, const T* x, bf16* y, std::int64_t count) {
  const std::uint32_t largest = largest_magnitude(parallel, x, count);
  const bool finite = largest < numerics::fp8_not_finite;
  const int e = finite ? numerics::fp8_exponent<Format>(largest) : 0;
  for_ranges(parallel, count, at_once, [=](std::int64_t begin, std::int64_t length) {
    vectorised([=, from = x + begin, to = y + begin] {
      if (!finite) {
        std::fill_n(to, length, numerics::fp8_to_bf16<Format>(numerics::fp8_nan_code<Format>()));
        return;
      }
#pragma GCC ivdep
      for (std::int64_t i = 0; i < length; ++i) {
        to[i] = numerics::scaled_fp8_to_bf16<Format>(numerics::to_scaled_fp8<Format>(to_float(from[i]), e), e);
      }
    });
  });
}

}  // namespace

std::size_t fp8_bytes(std::int64_t rows, std::int64_t columns) {
  return static_cast<std::size_t>(rows * columns) * sizeof(bf16);
}

TensorView fp8_values(const Fp8Matrix& m) { return {m.data, DType::bf16, {m.rows, m.columns}}; }

void quantize(Parallel& parallel, TensorView x, const Fp8Matrix& to) {
  bf16* const values = fp8_values(to).as<bf16>();
  with_activation(x.dtype, [&]<class T>(T) {
    if (to.format == Fp8Format::e4m3) return round_elements<numerics::E4m3>(parallel, x.as<T>(), values, x.count());
    round_elements<numerics::E5m2>(parallel, x.as<T>(), values, x.count());
  });
}

}  // namespace tandem::fast
