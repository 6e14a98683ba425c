#pragma once
// Lays buffers out one after another, some of them in the same place. One text both measures (on no
// memory) and carves (on real memory), so that a plan cannot disagree with what is taken.
#include <algorithm>
#include <cstddef>

#include "core/memory/memory.hpp"
#include "core/tensor/tensor.hpp"

namespace tandem {

class Carver {
 public:
  /// `base` is null to measure: views then have shapes but no memory. Does not own it.
  explicit Carver(void* base = nullptr) : base_(static_cast<std::byte*>(base)) {}

  /// The next buffer, aligned to `arena_alignment`.
  TensorView take(DType dtype, Shape shape) {
    TensorView view{base_ == nullptr ? nullptr : base_ + offset_, dtype, shape};
    offset_ += align_up(view.bytes());
    peak_ = std::max(peak_, offset_);
    return view;
  }

  /// Calls functions that take buffers; each begins at the same place, because what one takes is not
  /// needed while another's is.
  template <class... Alternatives>
  void overlay(const Alternatives&... alternatives) {
    const std::size_t begin = offset_;
    std::size_t end = begin;
    const auto one = [&](const auto& alternative) {
      offset_ = begin;
      alternative();
      end = std::max(end, offset_);
    };
    (one(alternatives), ...);
    offset_ = end;
  }

  std::size_t bytes() const noexcept { return peak_; }

 private:
  std::byte* base_;
  std::size_t offset_ = 0;
  std::size_t peak_ = 0;
};

}  // namespace tandem
