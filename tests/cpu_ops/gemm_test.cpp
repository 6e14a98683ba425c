// Tiles of products on the CPU.
#include "cpu_ops/kernels/gemm.hpp"

#include <cstring>
#include <vector>

#include "core/base/error.hpp"
#include "tests/cpu_ops/op_testing.hpp"

namespace tandem::testing {
namespace {

using fast::Op;

/// op(a) (rows, depth) and op(b) (depth, columns), as stored for each kind of product, and the c that is added to.
struct Matrices {
  std::int64_t rows, columns, depth;
  Op op_a, op_b;
  std::int64_t extra = 0;  ///< elements between rows as stored
  std::vector<float> a{}, b{}, c{};

  Matrices(Op first, Op second, std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t between)
      : rows(m), columns(n), depth(k), op_a(first), op_b(second), extra(between) {
    Random random(7);
    const auto fill = [&](std::vector<float>& values, std::int64_t count) {
      const Tensor drawn = random.tensor(DType::f32, {count});
      values.assign(drawn.view().as<float>(), drawn.view().as<float>() + count);
    };
    fill(a, (op_a == Op::plain ? rows : depth) * lda());
    fill(b, (op_b == Op::plain ? depth : columns) * ldb());
    fill(c, rows * ldc());
  }
  std::int64_t lda() const { return (op_a == Op::plain ? depth : rows) + extra; }
  std::int64_t ldb() const { return (op_b == Op::plain ? columns : depth) + extra; }
  std::int64_t ldc() const { return columns + extra; }

  /// The tile (m, n) of the product whose first element is (row, column), in place in `to`, which is laid out as c.
  void tile(std::int64_t row, std::int64_t column, std::int64_t m, std::int64_t n, float beta,
            std::vector<float>& to) const {
    fast::tile_gemm(m, n, depth,
                    {op_a, op_b, a.data() + (op_a == Op::plain ? row * lda() : row), lda(),
                     b.data() + (op_b == Op::plain ? column : column * ldb()), ldb()},
                    beta, to.data() + row * ldc() + column, ldc());
  }
  double exact(std::int64_t row, std::int64_t column, float beta) const {
    double sum = static_cast<double>(beta) * static_cast<double>(c.data()[row * ldc() + column]);
    for (std::int64_t k = 0; k < depth; ++k) {
      const float left = op_a == Op::plain ? a.data()[row * lda() + k] : a.data()[k * lda() + row];
      const float right = op_b == Op::plain ? b.data()[k * ldb() + column] : b.data()[column * ldb() + k];
      sum += static_cast<double>(left) * static_cast<double>(right);
    }
    return sum;
  }
};

struct Product {
  const char* name;
  Op op_a, op_b;
  std::int64_t most_rows, most_columns;  ///< most rows and columns of the layers' tiles
};
constexpr Product products[] = {{"Forward", Op::plain, Op::transposed, 516, 128},
                                {"Input", Op::plain, Op::plain, 516, 128},
                                {"Weight", Op::transposed, Op::plain, 128, 768}};

class TileGemm : public ::testing::TestWithParam<Product> {};

std::string product_name(const ::testing::TestParamInfo<Product>& info) { return info.param.name; }

/// Bits of m x n elements at (row, column).
bool same_tile(const Matrices& of, const std::vector<float>& a, const std::vector<float>& b, std::int64_t row,
               std::int64_t column, std::int64_t m, std::int64_t n) {
  for (std::int64_t r = row; r < row + m; ++r) {
    const std::int64_t at = r * of.ldc() + column;
    if (std::memcmp(a.data() + at, b.data() + at, static_cast<std::size_t>(n) * sizeof(float)) != 0) return false;
  }
  return true;
}

TEST_P(TileGemm, IsTheProduct) {
  const Product p = GetParam();
  for (const std::int64_t m : {1, 22, 55, 111}) {
    for (const std::int64_t n : {1, 15, 100}) {
      const Matrices of(p.op_a, p.op_b, m, n, 52, 3);
      for (const float beta : {0.0F, 1.0F}) {
        std::vector<float> result = of.c;
        of.tile(0, 0, m, n, beta, result);
        for (std::int64_t i = 0; i < m; ++i) {
          for (std::int64_t j = 0; j < of.ldc(); ++j) {
            const float actual = result.data()[i * of.ldc() + j];
            if (j >= n) {
              ASSERT_EQ(actual, of.c.data()[i * of.ldc() + j]) << "beyond the columns";
            } else {
              ASSERT_NEAR(static_cast<double>(actual), of.exact(i, j, beta), 2e-5)
                  << m << 'x' << n << ' ' << i << ' ' << j;
            }
          }
        }
      }
    }
  }
}

// The whole is compared with tiles of all kinds of extents at all kinds of places, of which each is laid out apart.
TEST_P(TileGemm, AnElementHasTheSameBitsInEveryTile) {
  const Product p = GetParam();
  for (const std::int64_t depth : {1, 3, 52, 300, 511, 768}) {
    const Matrices of(p.op_a, p.op_b, p.most_rows, p.most_columns, depth, 5);
    for (const float beta : {0.0F, 1.0F}) {
      std::vector<float> whole = of.c;
      of.tile(0, 0, of.rows, of.columns, beta, whole);
      const auto check = [&](std::int64_t row, std::int64_t column, std::int64_t m, std::int64_t n) {
        std::vector<float> part = of.c;
        of.tile(row, column, m, n, beta, part);
        ASSERT_TRUE(same_tile(of, part, whole, row, column, m, n))
            << m << 'x' << n << " at " << row << ',' << column << " of depth " << depth << ", beta " << beta;
      };
      // Every number of rows, with few columns; every number of columns, with few rows; and some of both.
      for (std::int64_t m = 1; m <= of.rows; m += m < 60 ? 1 : 7)
        check((of.rows - m) / 3, (of.columns - 17) / 2, m, 17);
      for (std::int64_t n = 1; n <= of.columns; n += n < 40 ? 1 : 31)
        check((of.rows - 13) / 2, (of.columns - n) / 3, 13, n);
      for (const std::int64_t m : {12, 36, 96, 126}) {
        for (const std::int64_t n : {16, 48, 112, 127}) check((of.rows - m) / 2, of.columns - n, m, n);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Products, TileGemm, ::testing::ValuesIn(products), product_name);

TEST(TileGemmChecks, TilesBeyondItsBuffersThrow) {
  std::vector<float> values(769 * 769);
  const fast::Factors factors{Op::plain, Op::plain, values.data(), 769, values.data(), 769};
  EXPECT_THROW(fast::tile_gemm(253, 253, 1, factors, 0.0F, values.data(), 769), MisuseError);
  EXPECT_THROW(fast::tile_gemm(1, 1, 769, factors, 0.0F, values.data(), 769), MisuseError);
  EXPECT_THROW(fast::tile_gemm(769, 1, 1, factors, 0.0F, values.data(), 769), MisuseError);
}

}  // namespace
}  // namespace tandem::testing
