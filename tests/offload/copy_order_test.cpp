// Copies made one after another have the effect of copies made at once, whatever overlaps what.
#include "offload/storage/copy_order.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <random>

#include "core/base/error.hpp"

namespace tandem {
namespace {

using Memory = std::array<std::vector<std::uint32_t>, 3>;  // by space; a word stands for a byte

std::vector<std::uint32_t>& space(Memory& memory, Space s) { return memory[static_cast<std::size_t>(s)]; }

Memory filled(std::size_t device, std::size_t host, std::size_t scratch) {
  Memory memory{std::vector<std::uint32_t>(device), std::vector<std::uint32_t>(host),
                std::vector<std::uint32_t>(scratch)};
  std::uint32_t next = 1;
  for (auto& s : memory)
    std::iota(s.begin(), s.end(), std::exchange(next, next + static_cast<std::uint32_t>(s.size())));
  return memory;
}

/// Returns the number of copies.
std::size_t expect_the_effect_of(const std::vector<PlacedCopy>& wanted, std::size_t device, std::size_t host,
                                 std::size_t scratch) {
  const Memory before = filled(device, host, scratch);
  Memory after = before;
  const std::vector<PlacedCopy> ordered = order_copies(wanted, scratch);
  for (const PlacedCopy& c : ordered) {
    auto& from = space(after, c.from);
    auto& to = space(after, c.to);
    EXPECT_LE(c.source + c.bytes, from.size());
    EXPECT_LE(c.target + c.bytes, to.size());
    EXPECT_TRUE(c.from != c.to || c.source + c.bytes <= c.target || c.target + c.bytes <= c.source);
    for (std::size_t i = 0; i < c.bytes; ++i) to[c.target + i] = from[c.source + i];
  }
  Memory original = before;
  for (const PlacedCopy& c : wanted) {
    const auto from = space(original, c.from).begin() + static_cast<std::ptrdiff_t>(c.source);
    const auto to = space(after, c.to).begin() + static_cast<std::ptrdiff_t>(c.target);
    EXPECT_TRUE(std::equal(from, from + static_cast<std::ptrdiff_t>(c.bytes), to));
  }
  return ordered.size();
}

/// Pieces of random length in random places of both spaces, for sources and, in another order, for targets.
std::vector<PlacedCopy> random_copies(std::mt19937& random, std::size_t device, std::size_t host) {
  std::vector<std::size_t> lengths;
  std::size_t total = 0;
  const std::size_t room = random() % 3 == 0 ? device + host : (device + host) * 4 / 5;
  while (true) {
    const std::size_t bytes = 1 + random() % 23;
    if (total + bytes > room) break;
    lengths.push_back(bytes);
    total += bytes;
  }
  const auto place = [&](std::vector<std::pair<Space, std::size_t>>& at) {
    std::vector<std::size_t> order(lengths.size());
    std::iota(order.begin(), order.end(), 0U);
    std::shuffle(order.begin(), order.end(), random);
    at.assign(lengths.size(), {Space::scratch, 0});
    std::size_t used_device = 0, used_host = 0;
    for (const std::size_t i : order) {
      if (used_device + lengths[i] <= device && (random() % 2 == 0 || used_host + lengths[i] > host)) {
        at[i] = {Space::device, std::exchange(used_device, used_device + lengths[i])};
      } else if (used_host + lengths[i] <= host) {
        at[i] = {Space::host, std::exchange(used_host, used_host + lengths[i])};
      }
    }
  };
  std::vector<std::pair<Space, std::size_t>> from, to;
  place(from);
  place(to);
  std::vector<PlacedCopy> copies;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    if (from[i].first == Space::scratch || to[i].first == Space::scratch) continue;  // found no room
    copies.push_back({from[i].first, to[i].first, from[i].second, to[i].second, lengths[i]});
  }
  return copies;
}

TEST(CopyOrder, HasTheEffectOfCopyingAllAtOnce) {
  for (unsigned seed = 0; seed < 3000; ++seed) {
    std::mt19937 random(seed);
    const std::size_t device = 20 + random() % 200, host = 20 + random() % 200, scratch = 2 + random() % 40;
    expect_the_effect_of(random_copies(random, device, host), device, host, scratch);
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
  }
}

TEST(CopyOrder, SwapsWithoutRoom) {
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{7}, std::size_t{64}}) {
    const std::vector<PlacedCopy> swap{{Space::device, Space::host, 0, 0, bytes},
                                       {Space::host, Space::device, 0, 0, bytes}};
    expect_the_effect_of(swap, bytes, bytes, 6);
  }
}

TEST(CopyOrder, ShiftsThroughTheScratchMemoryWhereTheDistanceIsShort) {
  for (const std::size_t distance : {std::size_t{1}, std::size_t{3}, std::size_t{500}}) {
    const std::vector<PlacedCopy> down{{Space::host, Space::host, distance, 0, 10000}};
    const std::vector<PlacedCopy> up{{Space::host, Space::host, 0, distance, 10000}};
    for (const auto& wanted : {down, up}) {
      const std::size_t copies = expect_the_effect_of(wanted, 1, 10500, 200);
      EXPECT_LE(copies, distance < 100 ? 200U : 20U);
    }
  }
}

TEST(CopyOrder, MovesWholeRunsWhereTheyCloseUp) {
  // One run in front leaves; those behind it close up: a copy each, and none waits for room.
  std::vector<PlacedCopy> wanted{{Space::host, Space::device, 0, 0, 100}};
  for (std::size_t i = 1; i < 50; ++i) wanted.push_back({Space::host, Space::host, 100 * i, 100 * (i - 1), 100});
  EXPECT_EQ(expect_the_effect_of(wanted, 100, 5000, 20), wanted.size());
  std::reverse(wanted.begin(), wanted.end());
  EXPECT_EQ(expect_the_effect_of(wanted, 100, 5000, 20), wanted.size());
}

TEST(CopyOrder, LeavesAloneWhatStays) {
  EXPECT_TRUE(order_copies({{Space::host, Space::host, 8, 8, 100}, {Space::host, Space::device, 0, 0, 0}}, 2).empty());
}

TEST(CopyOrder, RefusesTwoCopiesOfOneSource) {
  const std::vector<PlacedCopy> twice{{Space::host, Space::device, 0, 0, 4}, {Space::host, Space::device, 0, 8, 4}};
  EXPECT_THROW(order_copies(twice, 16), MisuseError);
  EXPECT_THROW(order_copies(twice, 1), MisuseError);
}

}  // namespace
}  // namespace tandem
