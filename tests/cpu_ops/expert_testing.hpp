#pragma once
// Routings for tests of experts, by the reference.
#include <limits>
#include <string>

#include "core/ops/ops.hpp"
#include "cpu_ops/reference/reference.hpp"
#include "tests/cpu_ops/op_testing.hpp"

namespace tandem::testing {

struct ExpertSizes {
  std::int64_t tokens = 1, experts = 1, choices = 1, channels = 1, inner = 1;

  std::int64_t rows() const { return tokens * choices; }
  std::string text() const {
    return std::to_string(tokens) + " tokens, " + std::to_string(choices) + " of " + std::to_string(experts) +
           " experts, " + std::to_string(channels) + " to " + std::to_string(inner);
  }
};

/// A routing's memory, on the host or the device.
template <class Memory>
struct Routed {
  operator Routing() const { return {experts, weights, begins, slots, rows}; }  // NOLINT: views of it are meant
  Memory experts, weights, begins, slots, rows;
};

inline Routed<Tensor> room_for(const ExpertSizes& s) {
  return {{DType::i32, {s.tokens, s.choices}},
          {DType::f32, {s.tokens, s.choices}},
          {DType::i32, {s.experts + 1}},
          {DType::i32, {s.rows()}},
          {DType::i32, {s.tokens, s.choices}}};
}

inline Routed<Tensor> routed(const ExpertSizes& s, const Tensor& logits, bool normalized = true) {
  Routed<Tensor> r = room_for(s);
  reference::route(logits, normalized, r);
  return r;
}

/// Logits with which some expert has no token, where there are enough.
inline Tensor logits_of(const ExpertSizes& s, unsigned seed) {
  Random random(seed);
  Tensor logits = random.tensor(DType::f32, {s.tokens, s.experts});
  if (s.experts > s.choices) {
    for (std::int64_t n = 0; n < s.tokens; ++n) logits.set(n * s.experts + s.experts / 2, -100.0F);
  }
  return logits;
}

inline std::int32_t at(const Tensor& t, std::int64_t i) { return t.view().as<std::int32_t>()[i]; }

/// Logits that are equal, infinite or no numbers, and what three of five experts are chosen. The second token's are all
/// NaN.
struct OddLogits {
  static constexpr ExpertSizes sizes{6, 5, 3};
  Tensor logits{DType::f32, {6, 5}};
  Tensor chosen{DType::i32, {6, 3}};

  OddLogits() {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    constexpr float nan = std::numeric_limits<float>::quiet_NaN();
    const float values[] = {0,        0,        0,   0,        0,   nan,       nan, nan, nan,       nan,
                            nan,      1,        nan, 2,        nan, -infinity, nan, 3,   -infinity, nan,
                            infinity, infinity, 0,   infinity, 0,   1,         2,   2,   1,         3};
    const std::int32_t experts[] = {0, 1, 2, 0, 1, 2, 3, 1, 0, 2, 0, 1, 0, 1, 3, 4, 1, 2};
    std::copy(std::begin(values), std::end(values), logits.view().as<float>());
    std::copy(std::begin(experts), std::end(experts), chosen.view().as<std::int32_t>());
  }
};

}  // namespace tandem::testing
