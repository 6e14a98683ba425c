#pragma once
// Element types of tensors.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "core/numerics/bf16.hpp"

namespace tandem {

enum class DType : std::uint8_t { f32, bf16, i32 };

/// Bytes of one element.
constexpr std::size_t size_of(DType dtype) noexcept { return dtype == DType::bf16 ? 2 : 4; }

constexpr std::string_view name_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::f32: return "f32";
    case DType::bf16: return "bf16";
    case DType::i32: return "i32";
  }
  return "unknown";
}

template <class T>
struct dtype_of;
template <>
struct dtype_of<float> {
  static constexpr DType value = DType::f32;
};
template <>
struct dtype_of<bf16> {
  static constexpr DType value = DType::bf16;
};
template <>
struct dtype_of<std::int32_t> {
  static constexpr DType value = DType::i32;
};

}  // namespace tandem
