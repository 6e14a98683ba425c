#pragma once
// Arithmetic of the toy trainer. Its loops are a library of their own, which is optimised where tests are not: most of
// the time of the engine's tests under a sanitizer went into them.
#include <cstdint>
#include <span>
#include <vector>

#include "core/numerics/bf16.hpp"
#include "core/tensor/tensor.hpp"

namespace tandem::testing {

/// A value in [-1, 1) from a counter.
inline float noise(std::uint64_t key, std::uint64_t counter) {
  std::uint64_t x = key * 0x9e3779b97f4a7c15ULL + counter * 0xbf58476d1ce4e5b9ULL + 1;
  x ^= x >> 31;
  x *= 0x94d049bb133111ebULL;
  x ^= x >> 29;
  return static_cast<float>(static_cast<double>(x >> 11) * 0x1.0p-52 - 1.0);
}
/// `values[i]` = `scale` noise(`key`, i).
void fill_with_noise(std::uint64_t key, float scale, std::span<float> values);

/// Adds `value` to an fp32 gradient, or writes it as a bf16 one.
inline void add_gradient(DType dtype, void* gradients, std::int64_t i, float value) {
  if (dtype == DType::bf16) {
    static_cast<bf16*>(gradients)[i] = numerics::round_to_bf16(value);
  } else {
    static_cast<float*>(gradients)[i] += value;
  }
}

/// Weight `i` of a view, whose memory is `values`.
inline float weight_at(const TensorView& w, const bf16* values, std::int64_t i) {
  return w.dtype == DType::f32 ? reinterpret_cast<const float*>(values)[i] : numerics::bf16_to_float(values[i]);
}

/// Weights as products of eight-bit factors see them: rounded whole, as Ops::quantize does.
std::vector<bf16> rounded_whole(const bf16* values, std::int64_t count);

/// A sum of the weights of a view, whose memory is `values`, in which each counts by its place.
/// @param factor  they are rounded whole first
float weighted_sum(const TensorView& w, const bf16* values, bool factor);

/// A part of a gradient, beside the weight that it is of.
struct GradientPart {
  std::uint64_t key = 0;  ///< key of the targets
  float instead = 0.0F;   ///< this for every element, where it is not zero
  bool poison = false;    ///< one element is not a number
  bool factor = false;    ///< weights are rounded whole first
};
/// Adds d/dw of 0.5 (w - target)^2 to the gradient `g`, whose memory is `out`: it depends on the weight's bits.
void add_gradient_of(const GradientPart& part, const TensorView& w, const bf16* values, const TensorView& g, void* out);

}  // namespace tandem::testing
