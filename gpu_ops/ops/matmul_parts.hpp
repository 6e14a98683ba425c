#pragma once
// Products in two parts, for the sake of a library whose fast kernels want whole packets. Internal to gpu_ops.
#include <optional>

#include "gpu_ops/base/matmul.hpp"

namespace tandem::gpu {

/// A product as two that are run one after the other.
struct ProductParts {
  Product first, second;
};

/// cuBLASLt's kernels that copy tiles 16 bytes at a time want extents along which memory is contiguous to be whole
/// packets of eight. A vocabulary of 50,257 is none, and is left with kernels that read element by element, at a
/// seventh of the rate. So a large product of bf16 whose rows are whole packets apart becomes that of the whole
/// packets, and that of the one to seven columns, rows or addends of sums that are left. Of a sum the few come first,
/// so that where they are rounded in between, it is of what is small. Empty where nothing would be gained: extents are
/// whole or small, rows are not, or the product has an epilogue.
std::optional<ProductParts> parts_of(const Product& product);

}  // namespace tandem::gpu
