// Proves that an index finds items of its own kind alone: what mixes kinds, or converts silently, does not compile.
#include "core/base/index.hpp"

#include <gtest/gtest.h>

#include <concepts>
#include <cstdint>
#include <type_traits>
#include <vector>

namespace tandem {
namespace {

struct Apple;
struct Pear;
using AppleIndex = Index<Apple>;
using PearIndex = Index<Pear>;
using FarApple = Index<Apple, std::int64_t>;
using Apples = IndexedVector<AppleIndex, double>;

template <class Items, class I>
concept FindsBy = requires(Items& items, I index) {
  items[index];
};
template <class A, class B>
concept Comparable = requires(A a, B b) {
  a == b;
}
|| requires(A a, B b) { a < b; };
template <class A, class B>
concept Subtractable = requires(A a, B b) {
  a - b;
};
template <class A, class B>
concept Addable = requires(A a, B b) {
  a + b;
};

static_assert(FindsBy<Apples, AppleIndex> && FindsBy<const Apples, AppleIndex>);
static_assert(!FindsBy<Apples, PearIndex> && !FindsBy<const Apples, PearIndex>);
static_assert(!FindsBy<Apples, FarApple> && !FindsBy<Apples, int> && !FindsBy<Apples, std::size_t>);
static_assert(!FindsBy<std::vector<double>, AppleIndex>);

static_assert(std::constructible_from<AppleIndex, int> && !std::convertible_to<int, AppleIndex>);
static_assert(!std::constructible_from<int, AppleIndex> && !std::constructible_from<bool, AppleIndex>);
static_assert(!std::constructible_from<AppleIndex, PearIndex> && !std::assignable_from<AppleIndex&, PearIndex>);
static_assert(!std::constructible_from<AppleIndex, FarApple> && !std::assignable_from<AppleIndex&, int>);

static_assert(Comparable<AppleIndex, AppleIndex> && !Comparable<AppleIndex, PearIndex> && !Comparable<AppleIndex, int>);
static_assert(Subtractable<AppleIndex, AppleIndex> && !Subtractable<AppleIndex, PearIndex>);
static_assert(Addable<AppleIndex, int> && !Addable<AppleIndex, AppleIndex> && !Addable<AppleIndex, PearIndex>);

// No dearer than its number: passed in a register, copied as bytes.
static_assert(sizeof(AppleIndex) == sizeof(int) && sizeof(FarApple) == sizeof(std::int64_t));
static_assert(std::is_trivially_copyable_v<AppleIndex> && std::is_trivially_destructible_v<AppleIndex>);

TEST(Index, IsNoneUntilItHasANumber) {
  EXPECT_TRUE(AppleIndex().none());
  EXPECT_TRUE(AppleIndex(-1) == AppleIndex());
  EXPECT_FALSE(AppleIndex(0).none());
  EXPECT_LT(AppleIndex(), AppleIndex(0));
}

TEST(Index, CountsLikeItsNumber) {
  AppleIndex index(22);
  EXPECT_EQ((++index).number(), 23);
  EXPECT_EQ((index++).number(), 23);
  EXPECT_EQ((--index).number(), 23);
  EXPECT_EQ((index + 32).number(), 55);
  EXPECT_EQ((index - 24).number(), -1);
  EXPECT_EQ(AppleIndex(55) - index, 32);
  EXPECT_EQ(FarApple(std::int64_t{1} << 40).position(), std::size_t{1} << 40);
}

TEST(Index, RangesVisitEachIndexOnceInOrder) {
  for (const std::size_t count : {0U, 1U, 22U, 55U}) {
    int next = 0;
    for (const AppleIndex index : indices<AppleIndex>(count)) EXPECT_EQ(index.number(), next++);
    EXPECT_EQ(static_cast<std::size_t>(next), count);
    EXPECT_EQ(indices<AppleIndex>(count).empty(), count == 0);
  }
  EXPECT_TRUE(IndexRange<AppleIndex>().empty());
}

TEST(Index, VectorsFindTheItemAtTheIndex) {
  Apples apples(22);
  for (const AppleIndex index : apples.indices()) apples[index] = 0.5 * index.number();
  apples.push_back(100.0);
  ASSERT_EQ(apples.size(), 23U);
  EXPECT_EQ(apples[AppleIndex(21)], 10.5);
  EXPECT_EQ(*(apples.begin() + 22), 100.0);
  IndexedVector<AppleIndex, bool> ripe(55);
  ripe[AppleIndex(54)] = true;
  for (const AppleIndex index : ripe.indices()) EXPECT_EQ(ripe[index], index.number() == 54);
}

}  // namespace
}  // namespace tandem
