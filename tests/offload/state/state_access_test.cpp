// State on the device is written by few copies: each costs a wait, whatever it carries. Parts of it, wherever they
// begin.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "cpu_ops/device/host_device.hpp"
#include "offload/engine/engine.hpp"
#include "tests/offload/toy/trainer.hpp"

namespace tandem {
namespace {

// Elements of the largest parameter: three of the pieces that the engine asks for, and an odd rest.
constexpr std::int64_t most_elements = 3 * (std::int64_t{1} << 20) + 100003;

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
  layout.add_layer("only").add("w", {most_elements});
  OffloadOptions options = testing::toy(policy).offload;
  options.state = state;
  options.subgroup_size = most_elements + 256;
  OffloadEngine engine(device, layout, options, make_plan(layout, options, {device.info().capacity, 0}));
  engine.initialize([](const Parameter&, std::int64_t first, std::span<float> values) { fill(first, values); });
  const int made = copies;
  const Parameter& w = *layout.owned_parameters().front();
  std::vector<float> moments(most_elements);
  fill(7, moments);
  for (const StateArray array : {StateArray::m, StateArray::v}) engine.write(w, array, 0, moments);
  return {made, engine.state_digest()};
}

TEST(StateOnTheDevice, IsWrittenByFewCopiesToTheSameBits) {
  for (const StateFormat state : state_formats) {
    const Counted there = written("device", state);
    EXPECT_LE(there.copies, 4 * 4) << "of master, moments and weights, in four pieces";
    EXPECT_GE(there.copies, 3 * 4);
    EXPECT_EQ(there.digest, written("host", state).digest);
  }
}

/// Fills an array with numbers that a byte holds exactly, also beside others: m may be negative.
void fill_codes(StateArray array, std::span<float> values) {
  constexpr float numbers[] = {1.0F, 0.875F, 0.0F, 0.25F, 0.01171875F, 1.875F, 0x1p-12F};
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = numbers[i % 7] * (array == StateArray::m && i % 3 == 0 ? -1.0F : 1.0F);
  }
}

// Records are whole and shared by those who write parts of them: a thread's part ends where a record does.
TEST(StateInRecords, IsWrittenAndReadInPartsOfAnyLength) {
  for (const char* policy : {"host", "device", "static:0.5"}) {
    HostDevice device({.capacity = std::size_t{256} << 20, .threads = 1, .update_threads = 8});
    ParameterLayout layout;
    layout.add_layer("only").add("before", {3001}).add("w", {most_elements});
    OffloadOptions options = testing::toy(policy).offload;
    options.state = StateFormat::byte_moments;
    OffloadEngine engine(device, layout, options, make_plan(layout, options, {device.info().capacity, 0}));
    engine.initialize([](const Parameter&, std::int64_t first, std::span<float> values) { fill(first, values); });
    const Parameter& w = layout.parameter("only.w");
    for (const StateArray array : {StateArray::m, StateArray::v}) {
      std::vector<float> written(most_elements), read(most_elements);
      fill_codes(array, written);
      for (std::int64_t at = 0, part = 1; at < most_elements;
           at += part, part = std::min(part * 3 + 1, most_elements - at)) {
        engine.write(w, array, at,
                     std::span(written).subspan(static_cast<std::size_t>(at), static_cast<std::size_t>(part)));
      }
      engine.read(w, array, read);
      for (std::size_t i = 0; i < read.size(); ++i) ASSERT_EQ(read[i], written[i]) << policy << ", " << i;
    }
  }
}

}  // namespace
}  // namespace tandem
