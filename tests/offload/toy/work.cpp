#include "tests/offload/toy/work.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "core/numerics/fp8_scale.hpp"

namespace tandem::testing {
namespace {

/// Weights of a view as the toy's work takes them.
class UsedWeights {
 public:
  UsedWeights(const TensorView& w, const bf16* values, bool factor) : w_(w), values_(values) {
    if (!factor) return;
    rounded_ = rounded_whole(values, w.count());
    values_ = rounded_.data();
  }
  float operator[](std::int64_t i) const { return weight_at(w_, values_, i); }

 private:
  TensorView w_;
  const bf16* values_;
  std::vector<bf16> rounded_;
};

}  // namespace

void fill_with_noise(std::uint64_t key, float scale, std::span<float> values) {
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = scale * noise(key, i);
}

std::vector<bf16> rounded_whole(const bf16* values, std::int64_t count) {
  using Format = numerics::E4m3;
  std::uint32_t largest = 0;
  for (std::int64_t i = 0; i < count; ++i) largest = std::max(largest, numerics::fp8_magnitude(values[i]));
  const bool finite = largest < numerics::fp8_not_finite;
  const int e = finite ? numerics::fp8_exponent<Format>(largest) : 0;
  std::vector<bf16> rounded(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < rounded.size(); ++i) {
    const std::uint8_t code = finite ? numerics::to_scaled_fp8<Format>(numerics::bf16_to_float(values[i]), e)
                                     : numerics::fp8_nan_code<Format>();
    rounded[i] = numerics::scaled_fp8_to_bf16<Format>(code, e);
  }
  return rounded;
}

float weighted_sum(const TensorView& w, const bf16* values, bool factor) {
  const UsedWeights used(w, values, factor);
  const std::int64_t count = w.count();
  float sum = 0.0F;
  for (std::int64_t i = 0; i < count; ++i) sum += used[i] * static_cast<float>(i % 5 - 2);
  return sum;
}

void add_gradient_of(const GradientPart& part, const TensorView& w, const bf16* values, const TensorView& g,
                     void* out) {
  const UsedWeights used(w, values, part.factor);
  const std::int64_t count = g.count();
  for (std::int64_t i = 0; i < count; ++i) {
    const bool spoilt = part.poison && i == count / 2;
    const float d = used[i] - noise(part.key, static_cast<std::uint64_t>(i));
    add_gradient(g.dtype, out, i, spoilt ? std::nanf("") : part.instead != 0.0F ? part.instead : d);
  }
}

}  // namespace tandem::testing
