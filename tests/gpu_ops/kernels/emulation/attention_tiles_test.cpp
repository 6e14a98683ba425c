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

/// Holds what ranges say of each other against what their rows do. A range of rows that sees some may be taken for one
/// that sees any between them.
template <class SeenBy>
void expect_as_rows(const SeenBy& seen, const gpu::RowRange& rows, const gpu::RowRange& others) {
  bool all = true, any = false;
  for (int row = rows.first; row <= rows.last; ++row) {
    for (int other = others.first; other <= others.last; ++other) {
      all = all && sees(seen(row), other);
      any = any || sees(seen(row), other);
    }
  }
  const gpu::SeenByRange range{seen(rows.first), seen(rows.last)};
  ASSERT_EQ(sees_all(range, others), all) << rows.first << ' ' << rows.last << ' ' << others.first;
  ASSERT_TRUE(sees_any(range, others) || !any) << rows.first << ' ' << rows.last << ' ' << others.first;
  if (rows.first == rows.last) {
    ASSERT_EQ(sees_any(range, others), any) << rows.first << ' ' << others.first;
  }
}

// Masks are left out where all is seen, and products where nothing is.
TEST(AttentionTiles, RangesSeeEachOtherAsTheirRowsDo) {
  constexpr std::int64_t tokens = 16, reach = 5;
  const std::int32_t first[tokens] = {0, 0, 0, 3, 4, 4, 4, 4, 4, 4, 4, 4, 12, 12, 14, 14};
  const std::int32_t end[tokens] = {3, 3, 3, 4, 12, 12, 12, 12, 12, 12, 12, 12, 14, 14, 16, 16};
  for (const RecordsView records : {RecordsView{}, RecordsView{first, end}}) {
    const AttentionShape shape{1, tokens, 1, 1, 1, 1.0F, reach, records};
    const auto keys_of = [&](std::int64_t t) { return gpu::keys_seen(0, t, shape, reach); };
    const auto queries_of = [&](std::int64_t t) { return gpu::queries_seen(0, t, shape, reach); };
    for (int row = 0; row < tokens; ++row) {
      for (int last = row; last < tokens; ++last) {
        for (int other = 0; other < tokens; ++other) {
          for (int last_other = other; last_other < tokens; ++last_other) {
            expect_as_rows(keys_of, {row, last}, {other, last_other});
            expect_as_rows(queries_of, {row, last}, {other, last_other});
          }
        }
      }
    }
    for (int query = 0; query < tokens; ++query) {
      for (int key = 0; key < tokens; ++key) {
        EXPECT_EQ(sees(keys_of(query), key), sees(queries_of(key), query)) << query << ' ' << key;
      }
    }
  }
}

}  // namespace
}  // namespace tandem::testing
