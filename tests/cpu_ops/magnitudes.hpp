#pragma once
// Elements by which magnitudes are tested, and the magnitude of a tensor by a plain loop.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "core/numerics/bf16.hpp"
#include "tests/cpu_ops/op_testing.hpp"

namespace tandem::testing {

/// Largest bits without the sign, those of bf16 in the upper half of a word.
inline std::uint32_t magnitude_of(const Tensor& x) {
  std::uint32_t largest = 0;
  for (std::int64_t i = 0; i < x.count(); ++i) {
    const std::uint32_t bits = x.dtype() == DType::bf16 ? static_cast<std::uint32_t>(x.view().as<bf16>()[i].bits) << 16
                                                        : numerics::float_bits(x.view().as<float>()[i]);
    largest = std::max(largest, bits & 0x7fffffffu);
  }
  return largest;
}

/// A kind of elements: of a normal distribution, the last one `last` where that is not 0.
struct Values {
  std::string name;
  float deviation = 1.0F;
  float last = 0.0F;

  Tensor tensor(Random& random, DType type, const Shape& shape) const {
    Tensor x = deviation > 0.0F ? random.tensor(type, shape, deviation) : Tensor(type, shape);
    // Zeros of both signs.
    for (std::int64_t i = 0; deviation == 0.0F && i < x.count(); i += 2) x.set(i, -0.0F);
    if (last != 0.0F) x.set(x.count() - 1, last);
    return x;
  }
};

inline std::vector<Values> all_values() {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  return {{"normal numbers"},
          {"denormal numbers", 1e-39F},
          {"large numbers", 1e30F},
          {"zeros", 0.0F},
          {"zeros and -3", 0.0F, -3},
          {"infinity", 1.0F, infinity},
          {"-infinity", 1.0F, -infinity},
          {"NaN", 1.0F, std::numeric_limits<float>::quiet_NaN()}};
}

/// Operands of norms and activations.
struct NormOperands {
  NormOperands(const Values& values, DType type, const Shape& shape)
      : random(5),
        x(values.tensor(random, type, shape)),
        up(random.tensor(type, shape)),
        dy(random.tensor(type, shape, 1e-3F)),
        weight(random.tensor(DType::bf16, {shape[1]})) {}
  Random random;
  Tensor x, up, dy, weight;
};

}  // namespace tandem::testing
