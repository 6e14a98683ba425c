#pragma once
// Typed kernels for views, and blocks of either activation type as fp32.
#include <string>
#include <string_view>

#include "core/host/vectorised.hpp"
#include "core/numerics/bf16.hpp"
#include "core/tensor/tensor.hpp"

namespace tandem::fast {

using numerics::from_float;
using numerics::to_float;

/// Calls f with a value of the activation type: `f(float{})` or `f(bf16{})`.
template <class F>
void with_activation(DType dtype, const F& f) {
  switch (dtype) {
    case DType::f32:
      return f(float{});
    case DType::bf16:
      return f(bf16{});
    case DType::i32:
      break;
  }
  throw MisuseError("activations of a type that kernels do not take", name_of(dtype));
}

template <class T>
T* optional(const TensorView& view) {
  return view ? view.as<T>() : nullptr;
}

inline void check_tokens(std::string_view op, const TensorView& tokens, std::int64_t vocabulary) {
  for (std::int64_t i = 0; i < tokens.count(); ++i) {
    const std::int32_t token = tokens.as<std::int32_t>()[i];
    if (token >= 0 && token < vocabulary) continue;
    throw MisuseError(std::string(op) + ": token outside the vocabulary", std::to_string(token));
  }
}

/// A block of fp32 values whose rows are `stride` apart.
struct FloatBlock {
  const float* data;
  std::int64_t stride;
};

/// Reads a block of bf16 into `room` (rows x columns, dense).
inline FloatBlock as_floats(const bf16* from, std::int64_t stride, std::int64_t rows, std::int64_t columns,
                            float* room) {
  constexpr std::int64_t line = 32;   // elements
  constexpr std::int64_t ahead = 12;  // rows
  vectorised([=] {
    for (std::int64_t r = 0; r < rows; ++r) {
      const bf16* const source = from + r * stride;
      float* const target = room + r * columns;
      // Narrow blocks of wide matrices are short runs that the hardware does not see coming.
      for (std::int64_t c = 0; c < columns; c += line) __builtin_prefetch(source + ahead * stride + c);
#pragma GCC ivdep
      for (std::int64_t c = 0; c < columns; ++c) target[c] = numerics::bf16_to_float(source[c]);
    }
  });
  return {room, columns};
}

/// fp32 is used where it lies; `room` is not touched.
inline FloatBlock as_floats(const float* from, std::int64_t stride, std::int64_t, std::int64_t, float*) {
  return {from, stride};
}

/// Writes a dense fp32 block as T.
template <class T>
void store_block(const float* from, std::int64_t rows, std::int64_t columns, T* to, std::int64_t stride) {
  vectorised([=] {
    for (std::int64_t r = 0; r < rows; ++r) {
      const float* const source = from + r * columns;
      T* const target = to + r * stride;
#pragma GCC ivdep
      for (std::int64_t c = 0; c < columns; ++c) target[c] = from_float<T>(source[c]);
    }
  });
}

}  // namespace tandem::fast
