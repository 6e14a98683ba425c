// Large copies, by one thread and by several, move every byte and no other.
#include "core/host/large_copy.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "cpu_ops/threads/parallel.hpp"

namespace tandem {
namespace {

std::vector<std::uint8_t> random_bytes(std::size_t count) {
  std::mt19937 random(7);
  std::vector<std::uint8_t> bytes(count);
  std::generate(bytes.begin(), bytes.end(), [&] { return static_cast<std::uint8_t>(random()); });
  return bytes;
}

constexpr std::size_t edge = 80;  ///< bytes before and behind what is copied

/// Fills `target`, has `copy` bring `size` bytes of `source` from one place to another, and looks at every byte.
template <class Copy>
void expect_copies(const std::vector<std::uint8_t>& source, std::vector<std::uint8_t>& target, std::size_t size, int from,
                   int to, const Copy& copy) {
  constexpr std::uint8_t untouched = 0xA5;
  std::fill(target.begin(), target.end(), untouched);
  copy(target.data() + to, source.data() + from, size);
  const auto begin = target.begin() + to;
  const auto end = begin + static_cast<std::ptrdiff_t>(size);
  const auto changed = [&](std::uint8_t byte) { return byte != untouched; };
  ASSERT_TRUE(std::equal(begin, end, source.begin() + from)) << size << ' ' << from << ' ' << to;
  ASSERT_TRUE(std::none_of(target.begin(), begin, changed)) << size << ' ' << from << ' ' << to;
  ASSERT_TRUE(std::none_of(end, target.end(), changed)) << size << ' ' << from << ' ' << to;
}

// Sizes around where it begins to stream, around whole groups of pages, and beyond, from and to any alignment.
TEST(LargeCopy, CopiesEveryByteAndNoOther) {
  constexpr std::size_t largest = large_copy_bytes + 70'000;
  const std::vector<std::uint8_t> source = random_bytes(largest + 2 * edge);
  std::vector<std::uint8_t> target(source.size());
  for (const std::size_t size : {std::size_t{0}, std::size_t{1}, large_copy_bytes - 1, large_copy_bytes,
                                 large_copy_bytes + 1, large_copy_bytes + 16'384 + 63, largest}) {
    for (const auto& [from, to] : {std::pair{0, 0}, {0, 1}, {3, 0}, {5, 63}, {64, 17}, {33, 64}}) {
      expect_copies(source, target, size, from, to, [&](void* t, const void* f, std::size_t n) { large_copy(t, f, n); });
    }
  }
}

// Sizes around one part of a thread, around two, and with parts of each thread's at odd alignments.
TEST(LargeCopy, OnSeveralThreadsCopiesEveryByteAndNoOther) {
  constexpr std::size_t part = std::size_t{1} << 20;
  const std::vector<std::uint8_t> source = random_bytes(3 * part + 70'000 + 2 * edge);
  std::vector<std::uint8_t> target(source.size());
  for (const int threads : {1, 3}) {
    const auto parallel = make_parallel(threads);
    for (const std::size_t size :
         {std::size_t{0}, std::size_t{1}, part - 1, part, part + 1, 2 * part, 3 * part + 70'000}) {
      for (const auto& [from, to] : {std::pair{0, 0}, {5, 63}}) {
        expect_copies(source, target, size, from, to,
                      [&](void* t, const void* f, std::size_t n) { large_copy(t, f, n, *parallel); });
      }
    }
  }
}

}  // namespace
}  // namespace tandem
