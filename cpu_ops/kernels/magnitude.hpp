#pragma once
// Magnitudes of MeasuredView on the host: one integer, the largest numerics::fp8_magnitude of all elements.
#include <algorithm>
#include <atomic>
#include <cstdint>

#include "core/host/vectorised.hpp"
#include "core/numerics/fp8_scale.hpp"

namespace tandem::fast {

/// Magnitude of a tensor while a kernel writes it. Threads add the parts that they have written, which then still lie
/// in their caches. Does nothing without memory.
class Magnitude {
 public:
  /// Begins with that of no elements. `memory`: that of a MeasuredView, or null.
  explicit Magnitude(void* memory) : largest_(static_cast<std::uint32_t*>(memory)) {
    if (largest_ != nullptr) *largest_ = 0;
  }

  /// Adds elements; several threads may at once.
  template <class T>
  void add(const T* x, std::int64_t count) const {
    if (largest_ == nullptr) return;
    std::uint32_t of_part = 0;
    vectorised([x, count, to = &of_part] {
      std::uint32_t seen = 0;
      for (std::int64_t i = 0; i < count; ++i) seen = std::max(seen, numerics::fp8_magnitude(x[i]));
      *to = seen;
    });
    const std::atomic_ref<std::uint32_t> largest(*largest_);
    std::uint32_t known = largest.load();
    while (known < of_part && !largest.compare_exchange_weak(known, of_part)) {
    }
  }

 private:
  std::uint32_t* largest_;
};

}  // namespace tandem::fast
