// How attention is cut: long sequences into several launches, and tiles into what shared memory gives at once.
#include <gtest/gtest.h>

#include <set>

#include "gpu_ops/base/attention.hpp"
#include "gpu_ops/base/geometry.hpp"
#include "gpu_ops/kernels/attention_operands.hpp"

namespace tandem::testing {
namespace {

TEST(AttentionLimits, ALaunchTakesNoMoreThanItsLimitUnlessACardWouldIdle) {
  const gpu::AttentionLimits limits{.multiply_adds = 1e9, .least_tiles = 16};
  EXPECT_EQ(gpu::tiles_at_once(1e6, limits), 1000);
  EXPECT_EQ(gpu::tiles_at_once(1e7, limits), 100);
  EXPECT_EQ(gpu::tiles_at_once(1e9, limits), 16);
  EXPECT_GT(gpu::tiles_at_once(0.0, limits), 16) << "no tokens";
  // A tile of 32 queries of dimension 128 at the end of 1,024 and of 131,072 tokens.
  EXPECT_GE(gpu::tiles_at_once(2.0 * 128 * 32 * 1024, {}), 8 * 1024 / 32 * 32) << "8 sequences of 32 heads: one launch";
  EXPECT_EQ(gpu::tiles_at_once(2.0 * 128 * 32 * 131072, {}), gpu::AttentionLimits{}.least_tiles);
}

// Shared memory has 32 banks of four bytes: eight packets of 16 bytes at once, if no two begin in the same bank.
TEST(AttentionTiles, EightRowsAreReadWithoutBankConflicts) {
  for (const int dim : {32, 64, 128}) {
    std::set<int> all;
    for (int first = 0; first < 64; first += 8) {
      for (int at = 0; at < dim; at += gpu::packet) {
        std::set<int> banks;
        for (int row = first; row < first + 8; ++row) {
          const int offset = gpu::tile_offset(dim, row, at);
          banks.insert(offset / gpu::packet % 8);
          all.insert(offset);
        }
        ASSERT_EQ(banks.size(), 8U) << dim << ' ' << first << ' ' << at;
      }
    }
    EXPECT_EQ(std::ssize(all), 64 * dim / gpu::packet);
    EXPECT_EQ(*all.rbegin(), 64 * dim - gpu::packet);
  }
}

// Masks are left out where all is seen, and products where nothing is.
TEST(AttentionTiles, RangesSeeEachOtherAsTheirRowsDo) {
  for (int ahead = -7; ahead <= 7; ++ahead) {
    for (int window = 1; window <= 9; ++window) {
      const gpu::Band band{ahead, ahead - window};
      for (int rows = 1; rows <= 4; ++rows) {
        const gpu::RowRange queries{2, 2 + rows - 1}, keys{1, 4};
        bool all = true, any = false;
        for (int query = queries.first; query <= queries.last; ++query) {
          for (int key = keys.first; key <= keys.last; ++key) {
            all = all && sees(band, query, key);
            any = any || sees(band, query, key);
          }
        }
        EXPECT_EQ(sees_all(band, queries, keys), all) << ahead << ' ' << window << ' ' << rows;
        EXPECT_EQ(sees_any(band, queries, keys), any) << ahead << ' ' << window << ' ' << rows;
      }
    }
  }
}

}  // namespace
}  // namespace tandem::testing
