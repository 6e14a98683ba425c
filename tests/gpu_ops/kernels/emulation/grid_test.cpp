// The emulation itself: that it runs what a GPU would, and that it shows what a GPU might hide.
#include "gpu_ops/emulation/grid.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <set>
#include <vector>

#include "core/base/error.hpp"
#include "gpu_ops/base/launch.hpp"

namespace tandem::gpu {
namespace {

constexpr int seeds = 5;

class EmulationTest : public ::testing::Test {
 protected:
  void TearDown() override { emulation::set_schedule({}); }
  static void use_seed(int seed) { emulation::set_schedule({.seed = static_cast<std::uint64_t>(seed)}); }
};

// -- kernels with and without a planted fault ----------------------------------------------------------------------

/// Each block turns its part of the array around through shared memory.
template <bool with_barrier>
TANDEM_KERNEL(most_threads)
reverse_kernel(float* data) {
  TANDEM_SHARED(float, room, most_threads);
  float* const own = data + block_index() * block_size();
  room[thread_index()] = own[thread_index()];
  if (with_barrier) barrier();
  own[thread_index()] = room[block_size() - 1 - thread_index()];
}

/// Reverses the values of each warp, through `dynamic` shared memory.
template <bool with_barrier>
TANDEM_KERNEL(most_threads)
reverse_warps_kernel(float* data) {
  TANDEM_DYNAMIC_SHARED(float, room);
  const int first = thread_index() / warp_lanes * warp_lanes, lane = thread_index() % warp_lanes;
  room[thread_index()] = data[thread_index()];
  if (with_barrier) warp_barrier();
  data[thread_index()] = room[first + warp_lanes - 1 - lane];
}

/// y = 2 x; a fault in the tail writes one element too many.
template <bool off_by_one>
TANDEM_KERNEL(most_threads)
double_kernel(const float* x, float* y, std::int64_t count) {
  const std::int64_t end = off_by_one ? count + 1 : count;
  for (std::int64_t i = block_index() * block_size() + thread_index(); i < end; i += grid_size() * block_size()) {
    y[i] = 2.0F * x[i];
  }
}

/// c (16, 8) += a (16, 16) b, where b is (16, 8), or its transpose (8, 16): each with its rows in shared memory.
template <bool transposed>
TANDEM_KERNEL(warp_lanes)
product_kernel(const bf16* a, const bf16* b, float* c) {
  TANDEM_SHARED(bf16, left, 16 * 16);
  TANDEM_SHARED(bf16, right, 16 * 8);
  const int lane = thread_index();
  for (int i = lane; i < 16 * 16; i += warp_lanes) left[i] = a[i];
  for (int i = lane; i < 16 * 8; i += warp_lanes) right[i] = b[i];
  warp_barrier();
  const Words of_a = load_matrices(left + lane % 16 * 16 + lane / 16 * 8);
  // The second half of the lanes names the same two matrices once more.
  const Words of_b =
      transposed ? load_matrices(right + lane % 8 * 16 + lane / 8 % 2 * 8) : load_transposed(right + lane % 16 * 8);
  ProductPart part{};
  for (int e = 0; e < 4; ++e) part.x[e] = c[(lane / 4 + e / 2 * 8) * 8 + lane % 4 * 2 + e % 2];
  multiply_add(part, of_a, of_b.word[0], of_b.word[1]);
  for (int e = 0; e < 4; ++e) c[(lane / 4 + e / 2 * 8) * 8 + lane % 4 * 2 + e % 2] = part.x[e];
}

TANDEM_KERNEL(most_threads) unwritten_kernel(float* result) {
  TANDEM_SHARED(float, room, warp_lanes);
  if (thread_index() != 3) room[thread_index()] = 1.0F;
  barrier();
  result[thread_index()] = room[thread_index()];
}

TANDEM_KERNEL(most_threads) half_of_the_block_waits_kernel() {
  if (thread_index() < block_size() / 2) barrier();
}

TANDEM_KERNEL(most_threads) half_of_a_warp_exchanges_kernel(int* result) {
  if (thread_index() % 2 == 0) result[thread_index()] = shuffle_xor(thread_index(), 2);
}

/// 2 KiB of static arrays.
TANDEM_KERNEL(most_threads) sharing_kernel(float* result) {
  TANDEM_SHARED(float, room, 512);
  room[thread_index()] = 1.0F;
  result[thread_index()] = room[thread_index()];
}

TANDEM_KERNEL(most_threads) throwing_kernel() {
  barrier();
  if (thread_index() == 5) throw InputError("thread 5");
  barrier();
}

/// Eight elements for each thread, by two copies, of which it may wait for one alone.
template <bool with_wait>
TANDEM_KERNEL(most_threads)
copying_kernel(const float* from, float* first, float* both) {
  TANDEM_SHARED(float, room, 8 * warp_lanes);
  float* const own = room + 8 * thread_index();
  for (int i = 0; i < 2; ++i) {
    start_copy(own + 4 * i, from + 8 * thread_index() + 4 * i);
    close_copies();
  }
  close_copies();  // a group without copies
  if (with_wait) await_copies<2>();
  first[thread_index()] = own[3];
  if (with_wait) await_copies<0>();
  both[thread_index()] = own[3] + own[7];
}

/// Four elements for each thread, and zeros instead for every other one, which names an address that it must not read.
TANDEM_KERNEL(most_threads) zeroing_kernel(const float* from, float* before, float* after) {
  TANDEM_SHARED(float, room, 4 * warp_lanes);
  float* const own = room + 4 * thread_index();
  const bool copies = thread_index() % 2 == 0;
  start_copy_or_zeros(own, copies ? from + 4 * thread_index() : nullptr, copies);
  close_copies();
  before[thread_index()] = own[3];
  await_copies<0>();
  after[thread_index()] = own[3];
}

TANDEM_KERNEL(most_threads) exchange_kernel(int* by_xor, int* by_shift, int* by_lane, std::uint32_t* votes) {
  for (int round = 0; round < 3; ++round) {
    by_xor[thread_index()] = shuffle_xor(thread_index() + round, 5) - round;
    by_shift[thread_index()] = shuffle_down(thread_index(), 8);
    by_lane[thread_index()] = value_of_lane(thread_index(), 7);
    votes[thread_index()] = ballot(thread_index() % 3 == round % 3);
  }
}

TANDEM_KERNEL(most_threads) visit_kernel(std::vector<std::int64_t>* visited) {
  visited->push_back(block_index() * block_size() + thread_index());
}

TANDEM_KERNEL(most_threads) misaligned_kernel(const float* data) { load_words(data + 1); }

std::vector<float> numbers(std::size_t count) {
  std::vector<float> all(count);
  std::iota(all.begin(), all.end(), 1.0F);
  return all;
}

template <class... P, class... A>
std::string refusal(void (*kernel)(P...), const Geometry& geometry, A... arguments) {
  try {
    launch("planted", kernel, geometry, nullptr, arguments...);
  } catch (const MisuseError& error) {
    return error.what();
  }
  return "";
}

// -- a GPU's rules -------------------------------------------------------------------------------------------------

TEST_F(EmulationTest, EveryThreadRunsOnceInAnOrderThatTheSeedChooses) {
  std::set<std::vector<std::int64_t>> orders;
  for (int seed = 1; seed <= seeds; ++seed) {
    for (int again = 0; again < 2; ++again) {
      use_seed(seed);
      std::vector<std::int64_t> visited;
      launch("visit", visit_kernel, Geometry{7, 64}, nullptr, &visited);
      orders.insert(visited);
      std::sort(visited.begin(), visited.end());
      ASSERT_EQ(visited.size(), 7U * 64U);
      for (std::size_t i = 0; i < visited.size(); ++i) EXPECT_EQ(visited[i], static_cast<std::int64_t>(i));
    }
  }
  EXPECT_EQ(orders.size(), static_cast<std::size_t>(seeds));
}

TEST_F(EmulationTest, SharedMemoryAndBarriersWorkUnderEverySeed) {
  for (int seed = 1; seed <= seeds; ++seed) {
    use_seed(seed);
    std::vector<float> data = numbers(3 * 96), warps = numbers(64);
    launch("reverse", reverse_kernel<true>, Geometry{3, 96}, nullptr, data.data());
    for (int i = 0; i < 3 * 96; ++i) {
      const int from = i / 96 * 96 + 96 - i % 96;
      EXPECT_EQ(data[static_cast<std::size_t>(i)], static_cast<float>(from));
    }
    launch("reverse_warps", reverse_warps_kernel<true>, Geometry{1, 64, 64 * sizeof(float)}, nullptr, warps.data());
    for (int i = 0; i < 64; ++i) {
      const int from = i / 32 * 32 + 32 - i % 32;
      EXPECT_EQ(warps[static_cast<std::size_t>(i)], static_cast<float>(from));
    }
  }
}

TEST_F(EmulationTest, ExchangesGiveEachLaneWhatItAskedFor) {
  std::vector<int> by_xor(64), by_shift(64), by_lane(64);
  std::vector<std::uint32_t> votes(64);
  launch("exchange", exchange_kernel, Geometry{1, 64}, nullptr, by_xor.data(), by_shift.data(), by_lane.data(),
         votes.data());
  for (int i = 0; i < 64; ++i) {
    const auto at = static_cast<std::size_t>(i);
    EXPECT_EQ(by_xor[at], i ^ 5);
    EXPECT_EQ(by_shift[at], i % 32 + 8 < 32 ? i + 8 : i);
    EXPECT_EQ(by_lane[at], i / 32 * 32 + 7);
    EXPECT_EQ(set_bits(votes[at]), i < 32 ? 10 : 11);
    EXPECT_EQ(lowest_bit(votes[at]), i < 32 ? 2 : 0);
    for (int lane = 0; lane < 32; ++lane) EXPECT_EQ(votes[at] >> lane & 1u, (i / 32 * 32 + lane) % 3 == 2 ? 1u : 0u);
  }
}

TEST_F(EmulationTest, APowerOfTwoIsTheNearestOrZeroBelowTheNormalNumbers) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  for (int i = -126; i <= 127; ++i) EXPECT_EQ(exp2_estimate(static_cast<float>(i)), std::ldexp(1.0F, i)) << i;
  EXPECT_EQ(exp2_estimate(-126.5F), 0.0F) << "a subnormal number";
  EXPECT_EQ(exp2_estimate(-infinity), 0.0F);
  EXPECT_EQ(exp2_estimate(-std::numeric_limits<float>::max()), 0.0F);
  EXPECT_EQ(exp2_estimate(128.0F), infinity);
  EXPECT_TRUE(std::isnan(exp2_estimate(std::numeric_limits<float>::quiet_NaN())));
  for (float x = -20.0F; x < 20.0F; x += 0.37F) EXPECT_FLOAT_EQ(exp2_estimate(x), std::pow(2.0F, x)) << x;
}

TEST_F(EmulationTest, APairIsTwoRoundedValuesTheFirstBelow) {
  EXPECT_EQ(bf16_pair(1.0F, -2.0F), 0xc0003f80u);
  // Between 1 and the next bf16 and between that and the one after it: to the even one. Subnormal numbers are kept.
  EXPECT_EQ(bf16_pair(numerics::bits_float(0x3f808000u), numerics::bits_float(0x3f818000u)), 0x3f823f80u);
  EXPECT_EQ(bf16_pair(numerics::bits_float(0x00018001u), numerics::bits_float(0x80010000u)), 0x80010002u);
  EXPECT_EQ(bf16_pair(std::numeric_limits<float>::max(), -std::numeric_limits<float>::infinity()), 0xff807f80u);
  const std::uint32_t nan = bf16_pair(0.0F, std::numeric_limits<float>::quiet_NaN());
  EXPECT_EQ(nan & 0xffffu, 0u);
  EXPECT_GT(nan >> 16 & 0x7fffu, 0x7f80u);
}

// -- faults that must show -----------------------------------------------------------------------------------------

// Product of integers, whose sums have no order. The PTX ISA says under ldmatrix and mma.m16n8k16 where each element
// lies.
TEST_F(EmulationTest, AProductOfAWarpIsThatOfItsMatrices) {
  constexpr std::size_t rows = 16, columns = 8, depth = 16;
  const auto small = [](std::size_t i) { return numerics::round_to_bf16(static_cast<float>(i % 23) - 11.0F); };
  std::vector<bf16> a(rows * depth), b(depth * columns), b_transposed(columns * depth);
  for (std::size_t i = 0; i < a.size(); ++i) a[i] = small(i);
  std::vector<float> before(rows * columns);
  std::iota(before.begin(), before.end(), -40.0F);
  std::vector<float> expected = before;
  for (std::size_t k = 0; k < depth; ++k) {
    for (std::size_t n = 0; n < columns; ++n) {
      b[k * columns + n] = b_transposed[n * depth + k] = small(k * columns + n + 5);
      for (std::size_t m = 0; m < rows; ++m) {
        expected[m * columns + n] +=
            numerics::bf16_to_float(a[m * depth + k]) * numerics::bf16_to_float(b[k * columns + n]);
      }
    }
  }
  for (int seed = 1; seed <= seeds; ++seed) {
    use_seed(seed);
    std::vector<float> c = before, c_transposed = before;
    launch("product", product_kernel<false>, Geometry{1, warp_lanes}, nullptr, a.data(), b.data(), c.data());
    launch("product", product_kernel<true>, Geometry{1, warp_lanes}, nullptr, a.data(), b_transposed.data(),
           c_transposed.data());
    EXPECT_EQ(c, expected);
    EXPECT_EQ(c_transposed, expected);
  }
}

TEST_F(EmulationTest, AMissingBarrierShows) {
  for (int seed = 1; seed <= seeds; ++seed) {
    use_seed(seed);
    std::vector<float> good = numbers(256), bad = good, good_warps = numbers(64), bad_warps = good_warps;
    launch("reverse", reverse_kernel<true>, Geometry{1, 256}, nullptr, good.data());
    launch("reverse", reverse_kernel<false>, Geometry{1, 256}, nullptr, bad.data());
    EXPECT_NE(bad, good);
    // A value that was read too early is the poison that shared memory starts with.
    EXPECT_TRUE(std::any_of(bad.begin(), bad.end(), [](float x) { return std::isnan(x); }));
    launch("reverse_warps", reverse_warps_kernel<true>, Geometry{1, 64, 64 * sizeof(float)}, nullptr,
           good_warps.data());
    launch("reverse_warps", reverse_warps_kernel<false>, Geometry{1, 64, 64 * sizeof(float)}, nullptr,
           bad_warps.data());
    EXPECT_NE(bad_warps, good_warps);
    // A dropped barrier is the fault above, planted from outside in the correct kernel.
    emulation::set_schedule({.seed = static_cast<std::uint64_t>(seed), .dropped_barrier = 0});
    std::vector<float> dropped = numbers(256);
    launch("reverse", reverse_kernel<true>, Geometry{1, 256}, nullptr, dropped.data());
    EXPECT_NE(dropped, good);
  }
}

TEST_F(EmulationTest, ACopyThatIsNotAwaitedShows) {
  alignas(16) float from[8 * warp_lanes];
  std::iota(from, from + 8 * warp_lanes, 0.0F);
  bool shown = false;
  for (int seed = 1; seed <= seeds; ++seed) {
    use_seed(seed);
    std::vector<float> first(warp_lanes), both(warp_lanes);
    launch("copying", copying_kernel<true>, Geometry{1, warp_lanes}, nullptr, from, first.data(), both.data());
    for (std::size_t i = 0; i < warp_lanes; ++i) {
      EXPECT_EQ(first[i], from[8 * i + 3]);
      EXPECT_EQ(both[i], from[8 * i + 3] + from[8 * i + 7]);
    }
    launch("copying", copying_kernel<false>, Geometry{1, warp_lanes}, nullptr, from, first.data(), both.data());
    shown = shown || std::isnan(first[0]);
  }
  EXPECT_TRUE(shown);
}

TEST_F(EmulationTest, ZerosInsteadOfACopyComeNoSoonerThanItWould) {
  alignas(16) float from[4 * warp_lanes];
  std::iota(from, from + 4 * warp_lanes, 1.0F);
  bool late = false;
  for (int seed = 1; seed <= seeds; ++seed) {
    use_seed(seed);
    std::vector<float> before(warp_lanes), after(warp_lanes);
    launch("zeroing", zeroing_kernel, Geometry{1, warp_lanes}, nullptr, from, before.data(), after.data());
    for (std::size_t i = 0; i < warp_lanes; ++i) EXPECT_EQ(after[i], i % 2 == 0 ? from[4 * i + 3] : 0.0F) << i;
    late = late || std::isnan(before[1]);
  }
  EXPECT_TRUE(late);
}

TEST_F(EmulationTest, AnOffByOneInATailShows) {
  for (const std::size_t count : {1UL, 22UL, 55UL, 256UL, 1000UL}) {
    // Behind the end lies a guard, as behind every operand of the tests of operations.
    std::vector<float> x = numbers(count + 1), good(count + 1, -7.0F), bad = good;
    const Geometry geometry{blocks_for(static_cast<std::int64_t>(count), most_threads), most_threads};
    launch("double", double_kernel<false>, geometry, nullptr, x.data(), good.data(), static_cast<std::int64_t>(count));
    launch("double", double_kernel<true>, geometry, nullptr, x.data(), bad.data(), static_cast<std::int64_t>(count));
    EXPECT_EQ(good.back(), -7.0F);
    EXPECT_NE(bad.back(), -7.0F);
  }
}

TEST_F(EmulationTest, SharedMemoryThatNobodyWroteIsNaN) {
  std::vector<float> result(warp_lanes);
  launch("unwritten", unwritten_kernel, Geometry{2, warp_lanes}, nullptr, result.data());
  for (std::size_t i = 0; i < result.size(); ++i) EXPECT_EQ(std::isnan(result[i]), i == 3) << i;
}

TEST_F(EmulationTest, ABarrierThatSomeThreadsMissIsRefusedByName) {
  EXPECT_THAT(refusal(half_of_the_block_waits_kernel, Geometry{1, 64}),
              ::testing::AllOf(::testing::HasSubstr("kernel planted"), ::testing::HasSubstr("wait for others")));
  std::vector<int> result(64);
  EXPECT_THAT(refusal(half_of_a_warp_exchanges_kernel, Geometry{1, 64}, result.data()),
              ::testing::HasSubstr("wait for others"));
}

TEST_F(EmulationTest, WhatAKernelThrowsReachesTheCallerAndTheNextGridRuns) {
  EXPECT_THROW(launch("throwing", throwing_kernel, Geometry{2, 64}, nullptr), InputError);
  std::vector<float> data = numbers(96);
  launch("reverse", reverse_kernel<true>, Geometry{1, 96}, nullptr, data.data());
  EXPECT_EQ(data[0], 96.0F);
}

// Shared memory that every GPU would refuse, or one of the cards alone.
TEST_F(EmulationTest, MoreSharedMemoryThanACardHasIsRefused) {
  std::vector<float> result(warp_lanes);
  EXPECT_NO_THROW(launch("sharing", sharing_kernel, Geometry{1, warp_lanes}, nullptr, result.data()));
  EXPECT_THAT(refusal(sharing_kernel, Geometry{1, warp_lanes, 64}, result.data()), ::testing::HasSubstr("2048 bytes"));
  EXPECT_NO_THROW(
      launch("reverse", reverse_warps_kernel<true>, Geometry{1, warp_lanes, 98 << 10}, nullptr, result.data()));
  EXPECT_THAT(refusal(reverse_warps_kernel<true>, Geometry{1, warp_lanes, 99 << 10}, result.data()),
              ::testing::HasSubstr("dynamic shared memory"));
}

TEST_F(EmulationTest, MisalignedWideAccessesAndWrongBlocksAreRefused) {
  alignas(16) const float data[8] = {};
  EXPECT_THAT(refusal(misaligned_kernel, Geometry{1, 32}, data), ::testing::HasSubstr("not aligned"));
  EXPECT_THAT(refusal(half_of_the_block_waits_kernel, Geometry{1, 33}), ::testing::HasSubstr("33 threads"));
}

}  // namespace
}  // namespace tandem::gpu
