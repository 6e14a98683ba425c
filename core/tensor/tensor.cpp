#include "core/tensor/tensor.hpp"

namespace tandem {

Shape::Shape(std::span<const std::int64_t> dims) {
  if (dims.size() > max_rank) {
    throw MisuseError("shape has " + std::to_string(dims.size()) + " dimensions", "at most " + std::to_string(max_rank),
                      "join some of them");
  }
  std::int64_t product = 1;
  for (const std::int64_t d : dims) {
    if (d < 0) throw MisuseError("shape has a negative dimension");
    if (__builtin_mul_overflow(product, d, &product)) throw MisuseError("shape has too many elements");
    dims_[static_cast<std::size_t>(rank_++)] = d;
  }
}

std::int64_t Shape::count() const noexcept {
  std::int64_t product = 1;
  for (int i = 0; i < rank_; ++i) product *= dims_[static_cast<std::size_t>(i)];
  return product;
}

std::string Shape::text() const {
  std::string text = "(";
  for (int i = 0; i < rank_; ++i) {
    if (i > 0) text += ", ";
    text += std::to_string((*this)[i]);
  }
  return text + ")";
}

TensorView TensorView::reshaped(Shape other) const {
  if (other.count() != count()) {
    throw MisuseError("reshape changes the element count", shape.text() + " to " + other.text());
  }
  return {data, dtype, other};
}

TensorView TensorView::rows(std::int64_t begin, std::int64_t end) const {
  if (shape.rank() < 1 || begin < 0 || end < begin || end > shape[0]) {
    throw MisuseError("rows outside the tensor", shape.text());
  }
  const std::int64_t row = shape[0] == 0 ? 0 : count() / shape[0];
  Shape part = shape;
  switch (shape.rank()) {
    case 1:
      part = {end - begin};
      break;
    case 2:
      part = {end - begin, shape[1]};
      break;
    case 3:
      part = {end - begin, shape[1], shape[2]};
      break;
    default:
      part = {end - begin, shape[1], shape[2], shape[3]};
      break;
  }
  return {static_cast<std::byte*>(data) + static_cast<std::size_t>(begin * row) * size_of(dtype), dtype, part};
}

}  // namespace tandem
