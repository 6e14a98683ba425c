#pragma once
// Matrix products of one thread, which all kernels are made of. oneDNN is behind them and nowhere else.
#include <cstdint>

namespace tandem::fast {

enum class Op : char { plain = 'N', transposed = 'T' };

/// op(a) op(b) of fp32 matrices, row-major: op(a) is (m, k), op(b) is (k, n). ld* are the distances of rows as stored.
struct Factors {
  Op op_a, op_b;
  const float* a;
  std::int64_t lda;
  const float* b;
  std::int64_t ldb;
};

/// c (m, n) = alpha op(a) op(b) + beta c, fp32, row-major. Runs on the calling thread alone. Bits are a function of the
/// arguments. Throws DeviceError when the library refuses.
void gemm(Op op_a, Op op_b, std::int64_t m, std::int64_t n, std::int64_t k, float alpha, const float* a,
          std::int64_t lda, const float* b, std::int64_t ldb, float beta, float* c, std::int64_t ldc);

/// Largest tiles of tile_gemm(): m, and n with rows of op(a) as stored or transposed; k.
constexpr std::int64_t most_tile_extent = 768;
constexpr std::int64_t most_tile_short_extent = 252;

/// Product of a tile: as gemm() with alpha 1, but an element of c has the same bits in every tile: they are a function
/// of its row of op(a), its column of op(b), k and c alone, not of m, n, ld* or its place among the others. m, n, k <=
/// most_tile_extent, and m or n <= most_tile_short_extent, else MisuseError.
void tile_gemm(std::int64_t m, std::int64_t n, std::int64_t k, const Factors& factors, float beta, float* c,
               std::int64_t ldc);

}  // namespace tandem::fast
