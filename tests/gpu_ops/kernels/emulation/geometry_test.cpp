// Launch geometry and index arithmetic are plain functions: checked for sizes that no test could run.
#include "gpu_ops/base/geometry.hpp"

#include <gtest/gtest.h>

#include <vector>

#include "core/memory/memory.hpp"
#include "gpu_ops/base/scratch.hpp"

namespace tandem::gpu {
namespace {

std::vector<std::int64_t> sizes() {
  std::vector<std::int64_t> all{0, 1, 7, 8, 9, 22, 55, 2047, 2048, 2049, 100003};
  for (int bits = 20; bits <= 40; ++bits) {
    for (const std::int64_t off : {-1, 0, 1}) all.push_back((std::int64_t{1} << bits) + off);
  }
  return all;
}

/// Elements that the threads of a grid reach by its strides, counted without walking: thread i takes packets i,
/// i + threads, ..., the last of which may be short.
std::int64_t reached(const Geometry& g, std::int64_t count) {
  const std::int64_t threads = g.grid * g.block, packets = ceil_div(count, packet);
  std::int64_t total = 0;
  for (std::int64_t i = 0; i < threads && i < packets; ++i) total += ceil_div(packets - i, threads);
  return total;
}

TEST(Geometry, EveryPacketHasExactlyOneThread) {
  for (const std::int64_t count : sizes()) {
    const Geometry g = pointwise_geometry(count);
    EXPECT_LE(g.grid, most_blocks);
    EXPECT_EQ(g.grid == 0, count == 0);
    EXPECT_EQ(g.block % warp_lanes, 0);
    EXPECT_EQ(reached(g, count), ceil_div(count, packet)) << count;
  }
}

TEST(Geometry, RowsOfAnyLengthHaveWholeWarpsAndNoMoreThanABlockHolds) {
  for (const std::int64_t channels : sizes()) {
    const Geometry g = row_geometry(1000, channels);
    EXPECT_EQ(g.grid, 1000);
    EXPECT_GE(g.block, warp_lanes);
    EXPECT_LE(g.block, most_threads);
    EXPECT_EQ(g.block % warp_lanes, 0);
    EXPECT_TRUE(g.block == most_threads || g.block * packet >= channels) << channels;
  }
  EXPECT_EQ(row_geometry(std::int64_t{1} << 40, 8).grid, most_blocks);
  EXPECT_EQ(row_geometry(0, 8).grid, 0);
  EXPECT_EQ(warp_row_geometry(1000).grid * warp_row_geometry(1000).block, 1000 * warp_lanes) << "a warp each";
  EXPECT_EQ(warp_row_geometry(1001).grid, 251);
  EXPECT_EQ(warp_row_geometry(std::int64_t{1} << 40).grid, most_blocks);
  EXPECT_EQ(warp_row_geometry(0).grid, 0);
}

TEST(Geometry, CutsCoverTheExtentOnceAndKeepTheirBounds) {
  for (const std::int64_t extent : sizes()) {
    for (const std::int64_t most : {1, 7, 64}) {
      for (const std::int64_t least : {1, 32}) {
        const Cut c = cut(extent, most, least);
        EXPECT_LE(c.parts, most);
        EXPECT_EQ(c.parts == 0, extent == 0);
        if (extent == 0) continue;
        EXPECT_GE(c.size, least);
        EXPECT_GE(c.parts * c.size, extent);
        EXPECT_LT((c.parts - 1) * c.size, extent);
      }
    }
  }
}

TEST(ExpertTiles, AreAsManyAsRowsCanComeToHoweverTheyAreSpread) {
  for (const std::int64_t tile : {1, 64, 128}) {
    for (const std::int64_t experts : {1, 3, 128}) {
      for (const std::int64_t rows : {0, 1, 2, 3, 127, 128, 129, 130, 1000}) {
        // The largest number of tiles: as many experts as there can be have one row more than whole tiles; the last has
        // the rest.
        std::int64_t left = rows, tiles = 0;
        for (std::int64_t e = 0; e + 1 < experts && left > 0; ++e) {
          left -= 1;
          tiles += 1;
        }
        tiles += ceil_div(left, tile);
        EXPECT_GE(most_expert_tiles(rows, experts, tile), tiles) << rows << ' ' << experts << ' ' << tile;
        EXPECT_LE(most_expert_tiles(rows, experts, tile), ceil_div(rows, tile) + experts);
        EXPECT_LE(most_expert_tiles(rows, experts, tile), rows);
      }
    }
    EXPECT_EQ(most_expert_tiles(std::int64_t{1} << 40, 1, tile), ceil_div(std::int64_t{1} << 40, tile));
    EXPECT_EQ(most_expert_tiles(0, 128, tile), 0);
  }
}

TEST(NormCuts, GiveEveryWarpARowAndStayWithinTheScratchOfLongerRows) {
  std::size_t before = 0;
  for (std::int64_t channels = 1; channels <= 20000; ++channels) {
    const std::size_t scratch = norm_backward_scratch(channels);
    EXPECT_GE(scratch, before) << channels;  // scratch for more channels is enough for fewer
    before = scratch;
    for (const std::int64_t rows : {1, 9, 8192, 1 << 30}) {
      const Cut c = norm_cut(rows, channels);
      EXPECT_TRUE(c.size >= most_warps || channels > warp_norm_channels) << channels;
      const std::size_t sums = align_up(static_cast<std::size_t>(c.parts * channels) * sizeof(float));
      EXPECT_TRUE(2 * sums <= scratch || channels > 8192) << channels;
      EXPECT_LE(column_sums_scratch(channels), scratch);
    }
  }
}

TEST(HeadLossRows, DependOnTokensAndVocabularyAndStayWithinTheScratch) {
  for (const std::int64_t vocabulary : {1, 101, 50257, 128256, 10000000}) {
    std::size_t before = 0;
    for (const std::int64_t tokens : {0, 1, 7, 512, 513, 1025, 100000}) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        const HeadShape shape{.tokens = tokens, .vocabulary = vocabulary, .activations = dtype};
        HeadShape forward = shape;
        forward.gradients = false;
        const HeadRows rows = head_loss_rows(shape);
        EXPECT_GE(rows.logits, 1);
        EXPECT_LE(rows.logits, rows.gradients);
        EXPECT_LE(rows.gradients, std::max<std::int64_t>(1, tokens));
        EXPECT_TRUE(dtype == DType::bf16 || rows.logits == rows.gradients);
        EXPECT_TRUE(rows.logits == 1 || rows.logits * vocabulary * 4 <= 128 << 20) << vocabulary;
        EXPECT_TRUE(rows.gradients == rows.logits || rows.gradients * vocabulary * 2 <= 256 << 20) << vocabulary;
        const auto logits = static_cast<std::size_t>(rows.logits * vocabulary) * 4;
        const auto gradients = static_cast<std::size_t>(rows.gradients * vocabulary) * (dtype == DType::f32 ? 0 : 2);
        EXPECT_GE(head_loss_scratch(rows, forward), logits);
        EXPECT_GE(head_loss_scratch(rows, shape), logits + gradients);
        const HeadRows most = most_head_loss_rows(shape);
        EXPECT_GE(most.logits, rows.logits);
        EXPECT_GE(most.gradients, rows.gradients);
      }
      const HeadShape shape{.tokens = tokens, .vocabulary = vocabulary, .activations = DType::bf16};
      const std::size_t bytes = head_loss_scratch(most_head_loss_rows(shape), shape);
      EXPECT_GE(bytes, before);  // scratch for more tokens is enough for fewer
      before = bytes;
    }
  }
}

TEST(HeadLossRows, AreAllWhereTheGradientOfTheWeightIsWrittenWhole) {
  for (const std::int64_t tokens : {1, 512, 2048}) {
    const auto of = [&](DType dtype) {
      return HeadShape{.tokens = tokens, .vocabulary = 128256, .activations = dtype, .written = 128256};
    };
    const HeadRows in_place = head_loss_rows(of(DType::f32));
    EXPECT_EQ(in_place.logits, tokens);
    EXPECT_EQ(in_place.gradients, tokens);
    const HeadRows apart = head_loss_rows(of(DType::bf16));
    EXPECT_EQ(apart.gradients, tokens);
    EXPECT_LE(apart.logits * 128256 * 4, 128 << 20);
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const std::size_t most = head_loss_scratch(most_head_loss_rows(of(dtype)), of(dtype));
      EXPECT_LE(head_loss_scratch(head_loss_rows(of(dtype)), of(dtype)), most);
    }
  }
}

TEST(Divisor, DividesAllNumbersBelowTwoToThe31) {
  constexpr std::uint64_t end = std::uint64_t{1} << 31;
  std::vector<std::uint32_t> divisors{(1U << 30) - 1, (1U << 30) + 1, 0x7fffffffU, 1U << 31};
  for (std::uint32_t d = 1; d <= 1025; ++d) divisors.push_back(d);
  for (const std::uint32_t d : divisors) {
    const Divisor divisor = divisor_of(d);
    for (std::uint64_t multiple = 0; multiple < end; multiple = multiple * 3 + 2 * std::uint64_t{d}) {
      for (const std::uint64_t number : {multiple / d * d, multiple / d * d + d - 1, end - 1 - multiple}) {
        if (number >= end) continue;
        ASSERT_EQ(divisor.quotient(static_cast<std::uint32_t>(number)), number / d) << number << " over " << d;
        ASSERT_EQ(divisor.remainder(static_cast<std::uint32_t>(number)), number % d) << number << " over " << d;
      }
    }
    const std::uint64_t last = (end - 1) / d * d;  // the number at which an error of the factor weighs most
    ASSERT_EQ(divisor.quotient(static_cast<std::uint32_t>(last)), last / d) << d;
    ASSERT_EQ(divisor.quotient(static_cast<std::uint32_t>(end - 1)), (end - 1) / d) << d;
    if (last > 0) {
      ASSERT_EQ(divisor.quotient(static_cast<std::uint32_t>(last - 1)), (last - 1) / d) << d;
    }
  }
}

TEST(HeadLossRows, AreEnoughForTheWeightsGradientToBeWorthItsTraffic) {
  for (const auto& [vocabulary, least] : {std::pair<std::int64_t, std::int64_t>{32000, 1024},
                                          {50257, 1024},
                                          {128256, 1024},
                                          {152064, 512},
                                          {256000, 512}}) {
    for (const std::int64_t tokens : {1024, 4096, 8192}) {
      EXPECT_GE(head_loss_rows({tokens, vocabulary, DType::bf16}).gradients, least) << vocabulary;
    }
  }
}

}  // namespace
}  // namespace tandem::gpu
