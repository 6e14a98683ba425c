// Matrices of eight-bit floating point. Here their elements lie as the numbers that the codes stand for, which bf16
// holds exactly: a product of such matrices is one of bf16.
#include <algorithm>

#include "core/numerics/fp8_scale.hpp"
#include "cpu_ops/kernels/elements.hpp"
#include "cpu_ops/kernels/kernels.hpp"
#include "cpu_ops/kernels/magnitude.hpp"

namespace tandem::fast {
namespace {

/// Elements that a thread takes at once.
constexpr std::int64_t at_once = 64 * 1024;

template <class T>
void add_all(Parallel& parallel, const T* x, std::int64_t count, const Magnitude& to) {
  for_ranges(parallel, count, at_once, [=](std::int64_t begin, std::int64_t length) { to.add(x + begin, length); });
}

/// Largest magnitude of x: what is known of it, or what is found.
template <class T>
std::uint32_t largest_magnitude(Parallel& parallel, MeasuredView x) {
  if (x.magnitude != nullptr) return *static_cast<const std::uint32_t*>(x.magnitude);
  std::uint32_t largest = 0;
  add_all(parallel, x.values.as<T>(), x.values.count(), Magnitude(&largest));
  return largest;
}

template <class Format, class T>
void round_elements(Parallel& parallel, MeasuredView of, bf16* y) {
  const T* const x = of.values.as<T>();
  const std::uint32_t largest = largest_magnitude<T>(parallel, of);
  const bool finite = largest < numerics::fp8_not_finite;
  const int e = finite ? numerics::fp8_exponent<Format>(largest) : 0;
  for_ranges(parallel, of.values.count(), at_once, [=](std::int64_t begin, std::int64_t length) {
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

void quantize(Parallel& parallel, MeasuredView x, const Fp8Matrix& to) {
  bf16* const values = fp8_values(to).as<bf16>();
  with_activation(x.values.dtype, [&]<class T>(T) {
    if (to.format == Fp8Format::e4m3) return round_elements<numerics::E4m3, T>(parallel, x, values);
    round_elements<numerics::E5m2, T>(parallel, x, values);
  });
}

void measure(Parallel& parallel, MeasuredView x) {
  with_activation(x.values.dtype,
                  [&]<class T>(T) { add_all(parallel, x.values.as<T>(), x.values.count(), Magnitude(x.magnitude)); });
}

}  // namespace tandem::fast
