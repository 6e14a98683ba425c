// The plain matrix product: a block for each tile of the result (matmul_tiles.hpp).
#include "core/numerics/fp8.hpp"
#include "gpu_ops/base/launch.hpp"
#include "gpu_ops/base/matmul.hpp"
#include "gpu_ops/kernels/elements.hpp"
#include "gpu_ops/kernels/matmul_tiles.hpp"

namespace tandem::gpu {
namespace {

constexpr int tile = PlainTiling::rows;
constexpr int depth = PlainTiling::depth;

/// Element (i, j) of a factor lies at data + i * row + j * column.
template <class T>
struct Strided {
  const T* data;
  std::int64_t row, column;
};

struct ProductShape {
  std::int64_t m, n, k;
  std::int64_t c_stride;
};

/// Stages rows [first, first + tile) of a factor, columns [begin, begin + depth), as to[column][row]; zeros outside.
/// `rows`, `columns`: its extent. Neighbouring threads read neighbouring memory, whichever way it lies.
template <class T>
TANDEM_DEVICE void stage(const Strided<T>& from, std::int64_t first, std::int64_t rows, std::int64_t begin,
                         std::int64_t columns, float* to) {
  stage_values(from.row == 1, to, [&](int r, int c) {
    const bool inside = first + r < rows && begin + c < columns;
    return inside ? to_float(from.data[(first + r) * from.row + (begin + c) * from.column]) : 0.0F;
  });
}

/// The tiles of a product. `stage_factors(row, column, k)` brings the parts of both factors from these on to shared
/// memory; `scaled(sum)` is what a sum counts as.
template <class C, class StageFactors, class Scaled>
TANDEM_DEVICE void make_tiles(const ProductShape& shape, const float* a_tile, const float* b_tile, const bf16* bias,
                              const C* addend, C* result, const StageFactors& stage_factors, const Scaled& scaled) {
  const std::int64_t across = ceil_div(shape.n, tile), tiles = across * ceil_div(shape.m, tile);
  for (std::int64_t index = block_index(); index < tiles; index += grid_size()) {
    const std::int64_t first_row = index / across * tile, first_column = index % across * tile;
    PlainSums sums = {};
    for (std::int64_t k = 0; k < shape.k; k += depth) {
      stage_factors(first_row, first_column, k);
      barrier();
      multiply(a_tile, b_tile, sums);
      barrier();
    }
    for_sums(sums, [&](int r, int c, float value) {
      const std::int64_t row = first_row + r, column = first_column + c;
      if (row >= shape.m || column >= shape.n) return;
      const std::int64_t at = row * shape.c_stride + column;
      value = scaled(value);
      if (bias != nullptr) value = value + to_float(bias[column]);
      if (addend != nullptr) value = to_float(addend[at]) + value;
      result[at] = from_float<C>(value);
    });
  }
}

/// `bt` is b transposed: (n, k).
template <class A, class B, class C>
TANDEM_KERNEL(most_threads)
matmul_kernel(Strided<A> a, Strided<B> bt, const bf16* bias, const C* addend, C* result, ProductShape shape) {
  TANDEM_SHARED(float, a_tile, PlainTiling::room);
  TANDEM_SHARED(float, b_tile, PlainTiling::room);
  make_tiles(
      shape, a_tile, b_tile, bias, addend, result,
      [&](std::int64_t row, std::int64_t column, std::int64_t k) {
        stage(a, row, shape.m, k, shape.k, a_tile);
        stage(bt, column, shape.n, k, shape.k, b_tile);
      },
      [](float sum) { return sum; });
}

/// A row-major factor of codes of Format, k of them in a row.
template <class Format>
struct Codes {
  const std::uint8_t* codes;
  const float* scale;
};

/// Stages rows of a factor of codes as stage() does.
template <class Format>
TANDEM_DEVICE void stage_codes(const Codes<Format>& from, std::int64_t first, std::int64_t rows, std::int64_t begin,
                               std::int64_t columns, float* to) {
  stage_values(false, to, [&](int r, int c) {
    const bool inside = first + r < rows && begin + c < columns;
    return inside ? numerics::fp8_to_float<Format>(from.codes[(first + r) * columns + begin + c]) : 0.0F;
  });
}

/// The scales multiply the sum, one after the other: their product may be no number of fp32.
template <class A, class B, class C>
TANDEM_KERNEL(most_threads)
fp8_matmul_kernel(Codes<A> a, Codes<B> b, const bf16* bias, const C* addend, C* result, ProductShape shape) {
  TANDEM_SHARED(float, a_tile, PlainTiling::room);
  TANDEM_SHARED(float, b_tile, PlainTiling::room);
  const float a_scale = *a.scale, b_scale = *b.scale;
  make_tiles(
      shape, a_tile, b_tile, bias, addend, result,
      [&](std::int64_t row, std::int64_t column, std::int64_t k) {
        stage_codes(a, row, shape.m, k, shape.k, a_tile);
        stage_codes(b, column, shape.n, k, shape.k, b_tile);
      },
      [=](float sum) { return numerics::mul(numerics::mul(sum, a_scale), b_scale); });
}

/// A factor as it is multiplied, its strides exchanged where it is transposed.
template <class T>
Strided<T> strided(const Factor& factor) {
  const auto* const data = static_cast<const T*>(factor.data);
  return factor.transposed ? Strided<T>{data, 1, factor.stride} : Strided<T>{data, factor.stride, 1};
}

template <class A, class B, class C>
void run(const Product& p, CUstream_st* stream) {
  const Strided<A> a = strided<A>(p.a);
  const Strided<B> b = strided<B>(p.b);
  launch("matmul", matmul_kernel<A, B, C>,
         Geometry{blocks_for(ceil_div(p.m, tile) * ceil_div(p.n, tile), 1), most_threads}, stream, a,
         Strided<B>{b.data, b.column, b.row}, p.bias, static_cast<const C*>(p.addend), static_cast<C*>(p.c),
         ProductShape{p.m, p.n, p.k, p.c_stride});
}

template <class A, class B, class C>
void run_fp8(const Fp8Product& p, CUstream_st* stream) {
  launch("fp8_matmul", fp8_matmul_kernel<A, B, C>,
         Geometry{blocks_for(ceil_div(p.m, tile) * ceil_div(p.n, tile), 1), most_threads}, stream,
         Codes<A>{p.a.codes, p.a.scale}, Codes<B>{p.b.codes, p.b.scale}, p.bias, static_cast<const C*>(p.addend),
         static_cast<C*>(p.c), ProductShape{p.m, p.n, p.k, p.n});
}

template <class C>
void run_fp8(const Fp8Product& p, CUstream_st* stream) {
  using numerics::E4m3;
  using numerics::E5m2;
  if (p.a.format == Fp8Format::e5m2) return run_fp8<E5m2, E4m3, C>(p, stream);
  if (p.b.format == Fp8Format::e5m2) return run_fp8<E4m3, E5m2, C>(p, stream);
  run_fp8<E4m3, E4m3, C>(p, stream);
}

}  // namespace

void plain_matmul(const Fp8Product& p, CUstream_st* stream) {
  if (p.c_dtype == DType::bf16) return run_fp8<bf16>(p, stream);
  run_fp8<float>(p, stream);
}

void plain_matmul(const Product& p, CUstream_st* stream) {
  if (p.epilogue != Epilogue::none) throw MisuseError("the plain matrix product has no epilogue");
  const bool half_a = p.a.dtype == DType::bf16, half_b = p.b.dtype == DType::bf16, half_c = p.c_dtype == DType::bf16;
  const bool known = p.a.dtype != DType::i32 && p.b.dtype != DType::i32 && p.c_dtype != DType::i32;
  if (known && half_a && half_b && half_c) return run<bf16, bf16, bf16>(p, stream);
  if (known && half_a && half_b && !half_c) return run<bf16, bf16, float>(p, stream);
  if (known && !half_a && half_b && !half_c) return run<float, bf16, float>(p, stream);
  if (known && !half_a && !half_b && half_c) return run<float, float, bf16>(p, stream);
  if (known && !half_a && !half_b && !half_c) return run<float, float, float>(p, stream);
  throw MisuseError("matrix product of types that kernels do not take", name_of(p.a.dtype), name_of(p.b.dtype));
}

}  // namespace tandem::gpu
