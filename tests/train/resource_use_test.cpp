// Resource that bound a step, from counters.
#include "train/report/resource_use.hpp"

#include <gtest/gtest.h>

#include <cmath>

namespace tandem {
namespace {

EngineCounters counters(LaneSeconds busy, std::uint64_t up = 0, std::uint64_t down = 0, std::uint64_t dram = 0) {
  EngineCounters c;
  c.busy = busy;
  c.bytes_host_to_device = up;
  c.bytes_device_to_host = down;
  c.dram_bytes = dram;
  return c;
}

TEST(ResourceUse, IsWhatCameBetween) {
  const EngineCounters before = counters({.compute = 1.0, .host_to_device = 2.0, .device_to_host = 3.0}, 100, 200, 300);
  const EngineCounters after =
      counters({.compute = 1.1, .host_to_device = 2.5, .device_to_host = 3.0}, 1100, 200, 2300);
  const ResourceUse use = use_between(before, after, 4.0, 0.0);
  EXPECT_EQ(use.h2d_bytes, 1000U);
  EXPECT_EQ(use.d2h_bytes, 0U);
  EXPECT_DOUBLE_EQ(use.h2d_bytes_per_second, 2000.0);
  EXPECT_TRUE(std::isnan(use.d2h_bytes_per_second));
  EXPECT_DOUBLE_EQ(use.dram_bytes_per_second, 500.0);
  EXPECT_EQ(use.bound_by, "host to device");
}

TEST(ResourceUse, NamesWhatWasBusyLongest) {
  const auto bound = [](LaneSeconds busy, std::uint64_t dram = 0, double rate = 0.0) {
    return use_between({}, counters(busy, 0, 0, dram), 2.0, rate).bound_by;
  };
  EXPECT_EQ(bound({.compute = 1.0, .host_to_device = 0.9, .device_to_host = 0.8, .cpu = 0.7}), "compute");
  EXPECT_EQ(bound({.compute = 0.5, .host_to_device = 0.9, .device_update = 0.5, .cpu = 0.7}), "compute");
  EXPECT_EQ(bound({.compute = 1.0, .device_to_host = 1.5, .cpu = 0.7}), "device to host");
  EXPECT_EQ(bound({.compute = 1.0, .cpu = 1.7}), "CPU");
  EXPECT_EQ(bound({.compute = 1.0, .cpu = 1.7}, 170, 100.0), "CPU");
  EXPECT_EQ(bound({.compute = 1.0, .cpu = 1.7}, 190, 100.0), "DRAM");
  EXPECT_EQ(bound({.compute = 1.8, .cpu = 1.7}, 190, 100.0), "compute");
}

TEST(RatesBetween, LeaveOutTheCpuWhereUpdatesRanOtherwiseThanPredicted) {
  const auto rate = [](bool speculates, std::uint64_t speculated, std::uint64_t taken_back) {
    EngineCounters after = counters({.cpu = 3.0, .cpu_update = 2.0});
    after.parameters_updated_cpu = 1000;
    after.parameters_speculated = speculated;
    after.parameters_taken_back = taken_back;
    return rates_between({}, after, speculates).cpu_update;
  };
  EXPECT_EQ(rate(false, 0, 0), 500.0);
  EXPECT_EQ(rate(true, 1000, 0), 500.0);
  EXPECT_EQ(rate(false, 1000, 0), 0.0) << "with a record, and predicted without";
  EXPECT_EQ(rate(true, 0, 0), 0.0) << "without a record, and predicted with one";
  EXPECT_EQ(rate(true, 1000, 24), 0.0) << "some were done twice";
}

}  // namespace
}  // namespace tandem
