// Updates on the CPU take as many threads as the plan says.
#include <gtest/gtest.h>

#include <span>

#include "offload/engine/engine.hpp"
#include "tests/offload/bare_step.hpp"
#include "tests/offload/idle_device.hpp"

namespace tandem {
namespace {

TEST(UpdateThreads, AreThoseOfThePlan) {
  testing::IdleDevice device;
  ParameterLayout layout;
  for (const char* name : {"first", "last"}) layout.add_layer(name).add("w", {3000});
  OffloadOptions options;
  options.policy = parse_policy("host");
  const auto plan_with = [&](int threads) {
    options.update_threads = threads;
    return make_plan(layout, options, {device.info().capacity, 0});
  };
  OffloadEngine engine(device, layout, options, plan_with(3));
  engine.initialize([](const Parameter&, std::span<float>) {});
  const Stream stream = device.make_stream("compute");
  const auto threads_of_a_step = [&] {
    testing::begin_bare_step(engine, 2, stream);
    engine.end_step();
    engine.wait();
    return device.host_kernels().last_most_threads.load();
  };
  EXPECT_EQ(threads_of_a_step(), 3);
  engine.adopt(plan_with(0));
  EXPECT_EQ(threads_of_a_step(), 0);
  engine.adopt(plan_with(5));
  EXPECT_EQ(threads_of_a_step(), 5);
}

}  // namespace
}  // namespace tandem
