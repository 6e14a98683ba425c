#include "gpu_ops/ops/matmul_parts.hpp"

#include "gpu_ops/base/geometry.hpp"

namespace tandem::gpu {
namespace {

/// Smallest extent that is divided: below it the remaining part would take as long as the rest.
constexpr std::int64_t least_divided = 4096;

std::int64_t whole(std::int64_t extent) { return extent / packet * packet; }
bool divides(std::int64_t extent) { return extent >= least_divided && extent % packet != 0; }

template <class T>
T* moved(T* data, DType dtype, std::int64_t elements) {
  using Byte = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
  if (data == nullptr) return nullptr;
  return reinterpret_cast<Byte*>(data) + elements * static_cast<std::int64_t>(size_of(dtype));
}

/// `elements` further along the rows (`down`: rows further) of a factor.
Factor moved(Factor f, std::int64_t elements, bool down) {
  f.data = moved(f.data, f.dtype, down != f.transposed ? elements * f.stride : elements);
  return f;
}

/// Columns from `begin` on.
Product columns_of(Product p, std::int64_t begin, std::int64_t count) {
  p.b = moved(p.b, begin, false);
  p.addend = moved(p.addend, p.c_dtype, begin);
  p.c = moved(p.c, p.c_dtype, begin);
  if (p.bias != nullptr) p.bias += begin;
  p.n = count;
  return p;
}

Product rows_of(Product p, std::int64_t begin, std::int64_t count) {
  p.a = moved(p.a, begin, true);
  p.addend = moved(p.addend, p.c_dtype, begin * p.c_stride);
  p.c = moved(p.c, p.c_dtype, begin * p.c_stride);
  p.m = count;
  return p;
}

/// The product's part that sums `count` addends from `begin` on.
Product sums_of(Product p, std::int64_t begin, std::int64_t count) {
  p.a = moved(p.a, begin, false);
  p.b = moved(p.b, begin, true);
  p.k = count;
  return p;
}

}  // namespace

std::optional<ProductParts> parts_of(const Product& p) {
  const bool packets = p.a.stride % packet == 0 && p.b.stride % packet == 0 && p.c_stride % packet == 0;
  if (p.a.dtype != DType::bf16 || p.b.dtype != DType::bf16 || p.epilogue != Epilogue::none || !packets) return {};
  if (divides(p.n)) return ProductParts{columns_of(p, 0, whole(p.n)), columns_of(p, whole(p.n), p.n - whole(p.n))};
  if (p.a.transposed && divides(p.m)) {
    return ProductParts{rows_of(p, 0, whole(p.m)), rows_of(p, whole(p.m), p.m - whole(p.m))};
  }
  const bool along_sums = !p.a.transposed || p.b.transposed;
  if (!along_sums || !divides(p.k) || p.addend != nullptr || p.bias != nullptr) return {};
  ProductParts parts{sums_of(p, whole(p.k), p.k - whole(p.k)), sums_of(p, 0, whole(p.k))};
  parts.second.addend = p.c;
  return parts;
}

}  // namespace tandem::gpu
