#pragma once
// A view of a tensor: its memory, shape and type. Views own nothing; each function that returns one states who owns the
// memory and how long it lives.
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

#include "core/base/error.hpp"
#include "core/tensor/dtype.hpp"

namespace tandem {

/// Dimensions of a tensor, up to eight, outermost first.
class Shape {
 public:
  static constexpr int max_rank = 8;

  Shape() = default;
  /// Throws MisuseError for more than max_rank dimensions, for a negative one, and where their product overflows.
  explicit Shape(std::span<const std::int64_t> dims);
  Shape(std::initializer_list<std::int64_t> dims) : Shape(std::span(dims.begin(), dims.size())) {}

  int rank() const noexcept { return rank_; }
  std::int64_t operator[](int i) const noexcept { return dims_[static_cast<std::size_t>(i)]; }
  /// Product of the dimensions; 1 for rank 0.
  std::int64_t count() const noexcept;
  std::string text() const;  ///< "(2, 8, 64)"
  bool operator==(const Shape&) const = default;

 private:
  std::array<std::int64_t, max_rank> dims_{};
  int rank_ = 0;
};

/// View of a tensor in device or host memory, dense and row-major. Trivially copyable; empty when `data` is null.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::f32;
  Shape shape;

  explicit operator bool() const noexcept { return data != nullptr; }
  std::int64_t count() const noexcept { return shape.count(); }
  std::size_t bytes() const noexcept { return static_cast<std::size_t>(count()) * size_of(dtype); }

  /// Typed pointer. Throws MisuseError where the dtype is another.
  template <class T>
  T* as() const {
    if (dtype_of<T>::value != dtype) {
      throw MisuseError("tensor view read as another type", std::string(name_of(dtype)));
    }
    return static_cast<T*>(data);
  }

  /// View of the same memory with another shape of equal count. Throws MisuseError otherwise.
  TensorView reshaped(Shape other) const;
  /// Rows [begin, end) of the outermost dimension. Throws MisuseError where there are fewer.
  TensorView rows(std::int64_t begin, std::int64_t end) const;
};

}  // namespace tandem
