#include "cpu_ops/checks.hpp"

#include <fmt/format.h>

namespace tandem::checks {
namespace {

std::string text(const TensorView& view) { return fmt::format("{} {}", name_of(view.dtype), view.shape.text()); }

}  // namespace

void Operands::fail(std::string_view why) const { throw MisuseError(operation_, why); }

void Operands::that(bool holds, std::string_view why) const {
  if (!holds) fail(why);
}

void Operands::require(const TensorView& view, std::string_view name, DType dtype, const Shape& shape) const {
  if (!view && shape.count() > 0) fail(fmt::format("{} is empty", name));
  if (view.dtype != dtype || !(view.shape == shape)) {
    fail(fmt::format("{} is {}, should be {} {}", name, text(view), name_of(dtype), shape.text()));
  }
}

void Operands::optional(const TensorView& view, std::string_view name, DType dtype, const Shape& shape) const {
  if (view) require(view, name, dtype, shape);
}

void Operands::activations(const TensorView& view, std::string_view name, int rank) const {
  if (!view && view.count() > 0) fail(fmt::format("{} is empty", name));
  if (view.dtype == DType::i32 || view.shape.rank() != rank) {
    fail(fmt::format("{} is {}, should be f32 or bf16 of {} dimensions", name, text(view), rank));
  }
}

void Operands::heads(const HeadsView& view, std::string_view name, DType dtype, std::int64_t heads,
                     std::int64_t dim) const {
  if (view.data == nullptr) fail(fmt::format("{} is empty", name));
  if (view.dtype != dtype || view.row_stride < heads * dim) {
    fail(fmt::format("{} is {} with rows {} apart, should be {} with rows at least {} apart", name, name_of(view.dtype),
                     view.row_stride, name_of(dtype), heads * dim));
  }
}

}  // namespace tandem::checks
