// State on the device is written by few copies: each costs a wait, whatever it carries.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "cpu_ops/host_device.hpp"
#include "offload/engine.hpp"
#include "tests/offload/toy_trainer.hpp"

namespace tandem {
namespace {

// Of pieces that the engine asks for, three and an odd rest.
constexpr std::int64_t elements = 3 * (std::int64_t{1} << 20) + 100003;

struct Counted {
  int copies = 0;
  std::string digest;
};

void fill(std::int64_t first, std::span<float> values) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = testing::noise(3, static_cast<std::uint64_t>(first) + i);
  }
}

/// Master and moments written in pieces, under one policy.
Counted written(const std::string& policy, StateFormat state) {
  std::atomic<int> copies = 0;
  HostDeviceOptions on{.capacity = std::size_t{256} << 20, .threads = 1, .update_threads = 8};
  on.faults = std::make_shared<HostFaults>();
  on.faults->before_task = [&](std::string_view, std::string_view task) { copies += task == "copy to device" ? 1 : 0; };
  HostDevice device(on);
  ParameterLayout layout;
  layout.add_layer("only").add("w", {elements});
  OffloadOptions options = testing::toy(policy).offload;
  options.state = state;
  options.subgroup_size = elements + 256;
  OffloadEngine engine(device, layout, options, make_plan(layout, options, {device.info().capacity, 0}));
  engine.initialize([](const Parameter&, std::int64_t first, std::span<float> values) { fill(first, values); });
  const int made = copies;
  const Parameter& w = *layout.owned_parameters().front();
  std::vector<float> moments(elements);
  fill(7, moments);
  for (const StateArray array : {StateArray::m, StateArray::v}) engine.write(w, array, 0, moments);
  return {made, engine.state_digest()};
}

TEST(StateOnTheDevice, IsWrittenByFewCopiesToTheSameBits) {
  for (const StateFormat state : {StateFormat::fp32, StateFormat::split, StateFormat::bf16_moments}) {
    const Counted there = written("device", state);
    EXPECT_LE(there.copies, 4 * 4) << "of master, moments and weights, in four pieces";
    EXPECT_GE(there.copies, 3 * 4);
    EXPECT_EQ(there.digest, written("host", state).digest);
  }
}

}  // namespace
}  // namespace tandem
