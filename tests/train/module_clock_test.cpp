// The time of a stream by parts, read without stopping it.
#include "train/runtime/module_clock.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "core/base/trace.hpp"
#include "cpu_ops/device/host_device.hpp"

namespace tandem {
namespace {

constexpr std::size_t megabytes = std::size_t{64} << 20;
constexpr std::chrono::milliseconds pause{200};

StreamPart part_of(ModuleKind kind) { return static_cast<StreamPart>(kind); }

TEST(ModuleClock, CountsEachPartOnceAndNothingBetweenSteps) {
  HostDevice device({.capacity = 2 * megabytes, .threads = 1});
  const Stream stream = device.make_stream("test");
  const MemoryBlock memory = device.allocate(megabytes, "test");
  ModuleClock clock(device, 60.0);
  const auto work = [&] { device.fill(memory.data(), 1, megabytes, stream); };
  for (int step = 0; step < 2; ++step) {
    const double begin = trace_now();
    clock.begin_pass(false);
    clock.begin(weights_part, stream);
    work();
    clock.begin(part_of(ModuleKind::mlp), stream);
    clock.count(ModuleKind::mlp, 3.0, 0.0);
    work();
    clock.begin(part_of(ModuleKind::mlp), stream);  // goes on
    clock.count(ModuleKind::mlp, 4.0, 5.0);
    work();
    clock.begin_pass(true);
    clock.begin(part_of(ModuleKind::mlp), stream);
    work();
    clock.begin(end_part, stream);
    const StreamFigures figures = clock.take();
    const double seconds = trace_now() - begin;
    double sum = 0.0;
    for (const PartFigures& part : figures) sum += part.seconds();
    EXPECT_LE(sum, seconds);
    EXPECT_GT(sum, 0.5 * seconds);
    const PartFigures& mlp = figures[part_of(ModuleKind::mlp)];
    EXPECT_GT(mlp.forward_seconds, 0.0);
    EXPECT_GT(mlp.backward_seconds, 0.0);
    EXPECT_GT(figures[weights_part].forward_seconds, 0.0);
    EXPECT_EQ(figures[weights_part].backward_seconds, 0.0);
    EXPECT_EQ(mlp.matmul_flops, 7.0);
    EXPECT_EQ(mlp.attention_flops, 5.0);
    EXPECT_EQ(mlp.calls, 2);
    std::this_thread::sleep_for(pause);  // time that belongs to no part
  }
}

}  // namespace
}  // namespace tandem
