#include "cpu_ops/kernels/gemm.hpp"

#include <dnnl.h>
#include <dnnl_debug.h>
#include <omp.h>

#include <algorithm>
#include <array>
#include <string>

#include "core/base/error.hpp"

namespace tandem::fast {
namespace {

/// oneDNN as distributed starts OpenMP threads of its own. Threads are the caller's business here (one
/// tile each), so OpenMP is held to one on every thread that comes by; the setting is per thread.
void hold_openmp_to_one_thread() {
  thread_local const bool held = [] {
    omp_set_num_threads(1);
    return true;
  }();
  static_cast<void>(held);
}

/// Extents for which oneDNN's kernels sum every element in the same order: rows of c in multiples of `rows` and at
/// least `least_rows`, columns in multiples of `columns`. Below and between them it takes other kernels (products by a
/// vector, of few rows, the ends of its register blocks) that sum in another order. Found by trial with the versions
/// named in docs/numerics.md; tests/cpu_ops/gemm_test.cpp compares all extents on each instruction set.
struct WholeTiles {
  std::int64_t rows, least_rows, columns;
};

constexpr std::int64_t most_least_rows = 24, whole_columns = 16;

WholeTiles whole_tiles() {
  static const WholeTiles of_library = [] {
    constexpr unsigned avx2_bits = dnnl_cpu_isa_avx2, avx512_bit = 0x20;
    const auto isa = static_cast<unsigned>(dnnl_get_effective_cpu_isa());
    const bool avx2 = (isa & avx2_bits) == avx2_bits && (isa & avx512_bit) == 0;
    // AVX2: register blocks of 6 rows, in blocks of 48 or 96, of which the last may be halved.
    return avx2 ? WholeTiles{12, most_least_rows, whole_columns} : WholeTiles{1, 16, whole_columns};
  }();
  return of_library;
}

/// An extent as `whole`, which needs no padding, and a `rest` of at most `least`, which is padded to it.
struct Division {
  std::int64_t whole, rest, padded;

  Division(std::int64_t extent, std::int64_t unit, std::int64_t least) {
    const std::int64_t over = extent % unit;
    // Units that join the rest cost nothing: it is padded to `least` anyway.
    const std::int64_t joining = over == 0 ? 0 : (least - 1) / unit * unit;
    whole = extent < least ? 0 : std::max(least, extent - over - joining);
    rest = extent - whole;
    padded = rest == 0 ? 0 : least;
  }
};

/// A block of op(matrix) as stored: rows and columns exchanged where it is transposed.
struct StoredBlock {
  const float* data;
  std::int64_t stride, rows, columns;
};

StoredBlock stored_block(Op op, const float* matrix, std::int64_t stride, std::int64_t row, std::int64_t column,
                         std::int64_t rows, std::int64_t columns) {
  if (op == Op::plain) return {matrix + row * stride + column, stride, rows, columns};
  return {matrix + column * stride + row, stride, columns, rows};
}

/// Copies a block into a dense one of at least its extents, zero beyond it.
StoredBlock padded_copy(const StoredBlock& from, float* to, std::int64_t rows, std::int64_t columns) {
  for (std::int64_t r = 0; r < from.rows; ++r) {
    std::fill(std::copy_n(from.data + r * from.stride, from.columns, to + r * columns), to + (r + 1) * columns, 0.0F);
  }
  std::fill(to + from.rows * columns, to + rows * columns, 0.0F);
  return {to, columns, rows, columns};
}

/// Copies a block of op(matrix) into a dense one; `rows` and `columns` are those of op(matrix).
StoredBlock padded_copy(Op op, const StoredBlock& from, float* to, std::int64_t rows, std::int64_t columns) {
  return op == Op::plain ? padded_copy(from, to, rows, columns) : padded_copy(from, to, columns, rows);
}

/// Part of a tile that is padded on its way through oneDNN, in buffers of its own.
struct Part {
  std::int64_t row, rows, padded_rows;
  std::int64_t column, columns, padded_columns;
};

void padded_gemm(const Part& part, std::int64_t k, const Factors& f, float beta, float* c, std::int64_t ldc) {
  std::array<float, most_least_rows * most_tile_extent> rows_of_a;   // NOLINT(cppcoreguidelines-pro-type-member-init)
  std::array<float, whole_columns * most_tile_extent> columns_of_b;  // NOLINT(cppcoreguidelines-pro-type-member-init)
  std::array<float, most_least_rows * most_tile_extent> result;      // NOLINT(cppcoreguidelines-pro-type-member-init)
  StoredBlock a = stored_block(f.op_a, f.a, f.lda, part.row, 0, part.rows, k);
  StoredBlock b = stored_block(f.op_b, f.b, f.ldb, 0, part.column, k, part.columns);
  if (part.padded_rows > part.rows) a = padded_copy(f.op_a, a, rows_of_a.data(), part.padded_rows, k);
  if (part.padded_columns > part.columns) b = padded_copy(f.op_b, b, columns_of_b.data(), k, part.padded_columns);
  float* const of_part = c + part.row * ldc + part.column;
  if (beta != 0.0F) {
    padded_copy({of_part, ldc, part.rows, part.columns}, result.data(), part.padded_rows, part.padded_columns);
  }
  gemm(f.op_a, f.op_b, part.padded_rows, part.padded_columns, k, 1.0F, a.data, a.stride, b.data, b.stride, beta,
       result.data(), part.padded_columns);
  for (std::int64_t r = 0; r < part.rows; ++r) {
    std::copy_n(result.data() + r * part.padded_columns, part.columns, of_part + r * ldc);
  }
}

void check_extents(std::int64_t m, std::int64_t n, std::int64_t k) {
  if (std::max({m, n, k}) <= most_tile_extent && std::min(m, n) <= most_tile_short_extent) return;
  throw MisuseError("tile_gemm: tile too large",
                    std::to_string(m) + " x " + std::to_string(n) + ", depth " + std::to_string(k));
}

}  // namespace

void gemm(Op op_a, Op op_b, std::int64_t m, std::int64_t n, std::int64_t k, float alpha, const float* a,
          std::int64_t lda, const float* b, std::int64_t ldb, float beta, float* c, std::int64_t ldc) {
  hold_openmp_to_one_thread();
  const dnnl_status_t status =
      dnnl_sgemm(static_cast<char>(op_a), static_cast<char>(op_b), m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
  if (status != dnnl_success) throw DeviceError("matrix product failed in oneDNN", dnnl_status2str(status));
}

void tile_gemm(std::int64_t m, std::int64_t n, std::int64_t k, const Factors& factors, float beta, float* c,
               std::int64_t ldc) {
  check_extents(m, n, k);
  const WholeTiles tiles = whole_tiles();
  const Division rows(m, tiles.rows, tiles.least_rows), columns(n, tiles.columns, tiles.columns);
  if (rows.whole > 0 && columns.whole > 0) {
    gemm(factors.op_a, factors.op_b, rows.whole, columns.whole, k, 1.0F, factors.a, factors.lda, factors.b, factors.ldb,
         beta, c, ldc);
  }
  if (columns.rest > 0 && rows.whole > 0) {
    padded_gemm({0, rows.whole, rows.whole, columns.whole, columns.rest, columns.padded}, k, factors, beta, c, ldc);
  }
  if (rows.rest == 0) return;
  if (columns.whole > 0) {
    padded_gemm({rows.whole, rows.rest, rows.padded, 0, columns.whole, columns.whole}, k, factors, beta, c, ldc);
  }
  if (columns.rest > 0) {
    padded_gemm({rows.whole, rows.rest, rows.padded, columns.whole, columns.rest, columns.padded}, k, factors, beta, c,
                ldc);
  }
}

}  // namespace tandem::fast
