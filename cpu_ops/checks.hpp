#pragma once
// Checks of operands before an operation is queued; each failure names the operation and the shapes.
#include <initializer_list>
#include <string>
#include <string_view>

#include "core/ops.hpp"

namespace tandem::checks {

/// The checks of one call.
class Operands {
 public:
  explicit Operands(std::string_view operation) : operation_(operation) {}

  /// A view with data, of this dtype and shape.
  void require(const TensorView& view, std::string_view name, DType dtype, const Shape& shape) const;
  /// The same, or empty.
  void optional(const TensorView& view, std::string_view name, DType dtype, const Shape& shape) const;
  /// A view with data, of this rank, f32 or bf16.
  void activations(const TensorView& view, std::string_view name, int rank) const;
  /// Heads with data of this dtype, whose rows are at least `heads * dim` apart.
  void heads(const HeadsView& view, std::string_view name, DType dtype, std::int64_t heads, std::int64_t dim) const;
  /// Throws "OPERATION: why" unless `holds`.
  void that(bool holds, std::string_view why) const;
  [[noreturn]] void fail(std::string_view why) const;

 private:
  std::string operation_;
};

}  // namespace tandem::checks
