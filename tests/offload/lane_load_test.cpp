// Which lanes take no more tasks.
#include "offload/execution/lane_load.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <random>

namespace tandem {
namespace {

TEST(LaneLoad, AgreesWithCountsOfEachLane) {
  LaneLoad load;
  std::array<int, lane_count> counts{};
  std::mt19937 random(7);
  for (int i = 0; i < 20000; ++i) {
    const auto number = random() % lane_count;
    const Lane lane = static_cast<Lane>(number);
    const bool more = random() % 16 < (i / 2000 % 2 == 0 ? 9U : 6U);  // they fill up, and empty, in turn
    if (more) {
      load.add(lane);
      ++counts[number];
    } else if (counts[number] > 0) {
      load.remove(lane);
      --counts[number];
    }
    int all = 0;
    for (int l = 0; l < lane_count; ++l) {
      const int in_flight = counts[static_cast<std::size_t>(l)];
      const Lane one = static_cast<Lane>(l);
      all += in_flight;
      ASSERT_EQ(load.full().has(one), is_of_device(one) && in_flight >= queued_ahead(one)) << name_of(one);
    }
    ASSERT_EQ(load.none(), all == 0);
  }
}

}  // namespace
}  // namespace tandem
