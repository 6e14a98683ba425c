// How calls of attention are cut for cuDNN, and described to it, up to sizes that no test could allocate.
#include "gpu_ops/base/attention_slices.hpp"

#include <gtest/gtest.h>

#include <string>

namespace tandem::gpu {
namespace {

AttentionShape shape_of(std::int64_t batch, std::int64_t sequence, std::int64_t heads, std::int64_t kv_heads,
                        std::int64_t head_dim) {
  return {batch, sequence, heads, kv_heads, head_dim, 1.0F};
}

std::int64_t row_of(const AttentionShape& s) { return (s.heads + 2 * s.kv_heads) * s.head_dim; }
AttentionSlices backward_of(const AttentionShape& s) { return backward_slices(s, row_of(s)); }

TEST(AttentionSlices, ASmallCallIsOneSlice) {
  const AttentionShape s = shape_of(3, 37, 6, 2, 8);
  EXPECT_EQ(forward_slices(s, row_of(s)), (AttentionSlices{3, 2}));
  EXPECT_EQ(backward_of(s), (AttentionSlices{3, 2}));
}

TEST(AttentionSlices, ALargeCallIsCutIntoSequencesThenHeads) {
  // gpt2-xl at 1,024 tokens: 25 heads of 2 MiB each, five sequences at most.
  const AttentionShape gpt2 = shape_of(12, 1024, 25, 25, 64);
  EXPECT_EQ(backward_of(gpt2), (AttentionSlices{4, 25}));
  // 7B Llama at 4,096: 32 heads of 32 MiB each.
  const AttentionShape llama = shape_of(2, 4096, 32, 32, 128);
  EXPECT_EQ(backward_of(llama), (AttentionSlices{1, 8}));
  // 8B Llama at 8,192: four query heads share keys, and their slice alone is more than is preferred.
  const AttentionShape grouped = shape_of(2, 8192, 32, 8, 128);
  EXPECT_EQ(backward_of(grouped), (AttentionSlices{1, 1}));
  EXPECT_GT(backward_workspace(grouped, 1, 1), preferred_workspace);
  // Forward needs no such workspace.
  EXPECT_EQ(forward_slices(grouped, row_of(grouped)), (AttentionSlices{2, 8}));
}

TEST(AttentionSlices, PowersOfTwoFillASliceWithWhatLiesBesideTheScores) {
  // 256 MiB of gradients of scores each: gpt2-medium in one call, 7B Llama, and 1B and 8B ones whose heads share keys.
  EXPECT_EQ(backward_of(shape_of(8, 1024, 16, 16, 64)), (AttentionSlices{8, 16}));
  EXPECT_EQ(backward_of(shape_of(4, 2048, 32, 32, 128)), (AttentionSlices{1, 32}));
  EXPECT_EQ(backward_of(shape_of(4, 2048, 32, 8, 64)), (AttentionSlices{1, 8}));
  EXPECT_EQ(backward_of(shape_of(2, 4096, 32, 8, 128)), (AttentionSlices{1, 2}));
}

TEST(AttentionSlices, ASequenceTooLongForTheWorkspaceIsNotAskedFor) {
  const AttentionShape s = shape_of(1, 32768, 32, 8, 128);
  EXPECT_EQ(backward_of(s), AttentionSlices{});
  EXPECT_NE(forward_slices(s, row_of(s)), AttentionSlices{});
}

TEST(AttentionSlices, ForwardOfLongSequencesIsCutByItsWork) {
  const AttentionShape longest_whole = shape_of(1, 16384, 32, 8, 128), twice = shape_of(1, 32768, 32, 8, 128);
  EXPECT_EQ(forward_slices(longest_whole, row_of(longest_whole)), (AttentionSlices{1, 8}));
  EXPECT_EQ(forward_slices(twice, row_of(twice)), (AttentionSlices{1, 2}));
  const AttentionShape several = shape_of(4, 16384, 32, 8, 128), longest = shape_of(2, 131072, 32, 8, 128);
  EXPECT_EQ(forward_slices(several, row_of(several)), (AttentionSlices{1, 8}));
  EXPECT_EQ(forward_slices(longest, row_of(longest)), (AttentionSlices{1, 1})) << "no less than a group";
  const AttentionShape odd = shape_of(1, 32767, 32, 8, 128);
  EXPECT_EQ(forward_slices(odd, row_of(odd)), (AttentionSlices{1, 8}))
      << "of which only the first would begin at a packet";
}

TEST(AttentionSlices, AWindowLeavesForwardLessWorkAndBackwardItsWorkspace) {
  AttentionShape s = shape_of(1, 32768, 32, 8, 128);
  s.window = 4096;
  EXPECT_EQ(forward_slices(s, row_of(s)), (AttentionSlices{1, 8}));
  EXPECT_EQ(backward_of(s), AttentionSlices{}) << "gradients of all scores are kept, hidden or not";
  for (const std::int64_t hides_nothing : {32768, 32773}) {
    s.window = hides_nothing;
    EXPECT_EQ(forward_slices(s, row_of(s)), (AttentionSlices{1, 2}));
  }
}

TEST(AttentionSlices, OneSliceSpansLessThanTheLibraryCounts) {
  // Rows of 1 Mi elements, 1,024 of them in a sequence: one is 2^30 elements, two are 2^31.
  const AttentionShape s = shape_of(4, 1024, 8, 8, 64);
  EXPECT_EQ(forward_slices(s, std::int64_t{1} << 20), (AttentionSlices{1, 8}));
  EXPECT_EQ(backward_slices(s, std::int64_t{1} << 20), (AttentionSlices{1, 8}));
  EXPECT_EQ(forward_slices(s, std::int64_t{1} << 21), AttentionSlices{});
  EXPECT_EQ(backward_slices(s, std::int64_t{1} << 40), AttentionSlices{});
}

TEST(AttentionSlices, StatisticsOfEverySliceBeginAtAPacket) {
  const AttentionShape even = shape_of(2, 4096, 32, 32, 128), odd = shape_of(2, 4097, 32, 32, 128);
  EXPECT_NE(backward_of(even), AttentionSlices{});
  EXPECT_EQ(backward_of(odd), AttentionSlices{});
}

TEST(AttentionSlices, SlicesCoverTheCallWithinTheWorkspace) {
  for (const std::int64_t batch : {1, 2, 7, 24}) {
    for (const std::int64_t sequence : {2, 100, 1024, 2048, 4096, 8192, 16384}) {
      for (const std::int64_t kv_heads : {1, 3, 8, 25}) {
        for (const std::int64_t group : {1, 4, 7}) {
          const AttentionShape s = shape_of(batch, sequence, kv_heads * group, kv_heads, 128);
          const AttentionSlices slices = backward_of(s);
          SCOPED_TRACE(std::to_string(batch) + " x " + std::to_string(sequence) + ", " + std::to_string(kv_heads) +
                       " of " + std::to_string(group));
          if (slices.batch == 0) {
            EXPECT_GT(backward_workspace(s, 1, 1), most_workspace);
            continue;
          }
          EXPECT_EQ(batch % slices.batch, 0);
          EXPECT_EQ(kv_heads % slices.kv_heads, 0);
          EXPECT_TRUE(slices.batch == 1 || slices.kv_heads == kv_heads);
          const std::size_t bytes = backward_workspace(s, slices.batch, slices.kv_heads);
          EXPECT_LE(bytes, std::max(preferred_workspace, backward_workspace(s, 1, 1)));
          // Booked for the largest batch, enough for a smaller one.
          for (std::int64_t fewer = 1; fewer <= batch; ++fewer) {
            AttentionShape less = s;
            less.batch = fewer;
            const AttentionSlices cut = backward_slices(less, row_of(s));
            EXPECT_LE(backward_workspace(less, cut.batch, cut.kv_heads), backward_scratch(s));
            EXPECT_LE(backward_scratch(less), backward_scratch(s));
          }
        }
      }
    }
  }
}

TEST(AttentionSlices, OperandsAreDescribedAsTheyLie) {
  const AttentionShape s = shape_of(3, 37, 6, 2, 8);
  EXPECT_EQ(heads_tensor(s, 3, 6, 80), (HeadsTensor{{3, 6, 37, 8}, {37 * 80, 8, 80, 1}}));
  EXPECT_EQ(heads_tensor(s, 1, 3, 80), (HeadsTensor{{1, 3, 37, 8}, {37 * 80, 8, 80, 1}}));
  EXPECT_EQ(statistics_tensor(s, 3, 6), (HeadsTensor{{3, 6, 37, 1}, {6 * 37, 37, 1, 1}}));
  // A slice of heads looks packed to who sees no other sequence.
  EXPECT_EQ(statistics_tensor(s, 1, 3), (HeadsTensor{{1, 3, 37, 1}, {3 * 37, 37, 1, 1}}));
}

TEST(AttentionSlices, PartsOfOperandsBeginWhereTheirFirstTokenLies) {
  const AttentionShape s = shape_of(3, 37, 6, 2, 8);
  EXPECT_EQ(heads_offset(s, 80, 0, 0), 0);
  EXPECT_EQ(heads_offset(s, 80, 2, 3), 2 * 37 * 80 + 3 * 8);
  EXPECT_EQ(statistics_offset(s, 2, 3), (2 * 6 + 3) * 37);
  // 2^40 elements in, nothing has wrapped.
  const AttentionShape vast = shape_of(1 << 20, 1 << 10, 16, 16, 64);
  EXPECT_EQ(heads_offset(vast, 1 << 10, 1 << 20, 0), std::int64_t{1} << 40);
}

}  // namespace
}  // namespace tandem::gpu
