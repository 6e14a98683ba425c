// Calibration measures every figure that the performance model needs, and leaves nothing behind.
#include "api/calibrate.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "api/copy_load.hpp"
#include "core/base/error.hpp"
#include "core/memory/memory.hpp"
#include "cpu_ops/device/host_device.hpp"
#include "tests/offload/idle_device.hpp"

namespace tandem {
namespace {

using namespace literals;  // NOLINT: sizes
using ::testing::AllOf;
using ::testing::HasSubstr;

/// A device that is calibrated in no time.
HostDevice small_device() { return HostDevice({.capacity = 64_MiB, .threads = 2, .update_threads = 2}); }
constexpr double no_time = 1e-6;

TEST(Calibrate, MeasuresEveryRequiredFigureAndGivesItsMemoryBack) {
  HostDevice device = small_device();
  std::vector<std::string> told;
  const CalibrationOptions options{.seconds_per_figure = no_time,
                                   .progress = [&](std::string_view what) { told.emplace_back(what); }};
  const MachineProfile profile = calibrate(device, options);
  EXPECT_NO_THROW(profile.check());
  for (const ProfileField& field : profile_fields()) {
    if (field.required) {
      EXPECT_TRUE((profile.*field.figure).known()) << field.section << '.' << field.key;
    }
  }
  EXPECT_FALSE(profile.disk.known()) << "no folder was given";
  ASSERT_EQ(profile.by_threads.size(), 2U);
  EXPECT_EQ(profile.by_threads[1].threads, 2);
  EXPECT_THAT(told, ::testing::IsSupersetOf({"copies both ways", "CPU update", "attention"}));
  EXPECT_EQ(device.allocated_bytes(), 0U);
  EXPECT_EQ(device.pinned_bytes(), 0U);
  EXPECT_LE(device.peak_bytes(), 64_MiB);
}

// A model's backward is most of its attention, and on a GPU slower than forward.
TEST(Calibrate, AttentionIsForwardAndBackward) {
  const auto faults = std::make_shared<HostFaults>();
  std::atomic<int> forward = 0, backward = 0;
  faults->before_task = [&](std::string_view, std::string_view task) {
    forward += task == "attention" ? 1 : 0;
    backward += task == "attention_backward" ? 1 : 0;
  };
  HostDevice device({.capacity = 64_MiB, .threads = 2, .update_threads = 2, .faults = faults});
  calibrate(device, {.seconds_per_figure = no_time});
  EXPECT_GT(forward, 1);
  EXPECT_EQ(forward, backward);
}

TEST(Calibrate, LeavesNoScratchBoundThatIsGone) {
  HostDevice device = small_device();
  const Stream stream = device.make_stream("caller");
  const MemoryBlock memory = device.allocate(32_KiB, "operands");
  const TensorView x{memory.data(), DType::f32, {16, 64}};
  const TensorView w{static_cast<std::byte*>(memory.data()) + 8_KiB, DType::bf16, {64, 64}};
  const TensorView y{static_cast<std::byte*>(memory.data()) + 16_KiB, DType::f32, {16, 64}};
  calibrate(device, {.seconds_per_figure = no_time});
  device.ops().linear(x, w, {}, y, stream);
  EXPECT_THROW(device.synchronize(stream), MisuseError) << "a product needs scratch, and none is lent";
}

// Some are measured beside a thread that copies.
TEST(Calibrate, CanBeEndedBeforeAnyFigure) {
  struct Enough {};
  HostDevice device = small_device();
  int figures = 0;
  calibrate(device, {.seconds_per_figure = no_time, .progress = [&](std::string_view) { ++figures; }});
  for (int last = 0; last < figures; ++last) {
    int left = last;
    const auto end_at_last = [&](std::string_view) {
      if (left-- == 0) throw Enough{};
    };
    EXPECT_THROW(calibrate(device, {.seconds_per_figure = no_time, .progress = end_at_last}), Enough);
    EXPECT_EQ(device.allocated_bytes(), 0U);
    EXPECT_EQ(device.pinned_bytes(), 0U);
  }
}

// They copy on a thread of their own, and what that throws would else end the process.
TEST(Calibrate, AFailureOfTheCopiesBesideUpdatesReachesTheCaller) {
  HostDeviceOptions of_device{.capacity = 64_MiB, .threads = 1, .update_threads = 1};
  of_device.faults = std::make_shared<HostFaults>();
  std::atomic<bool> fails = false;
  of_device.faults->before_task = [&](std::string_view, std::string_view task) {
    if (fails && task == "copy to device") throw DeviceError("injected failure");
  };
  HostDevice device(of_device);
  const auto fail_from_here = [&](std::string_view what) { fails = fails || what.starts_with("CPU update beside"); };
  constexpr double time_to_copy = 0.01;
  EXPECT_THROW(calibrate(device, {.seconds_per_figure = time_to_copy, .progress = fail_from_here}), DeviceError);
  EXPECT_EQ(device.allocated_bytes(), 0U);
  EXPECT_EQ(device.pinned_bytes(), 0U);
}

// How fast a copy goes may depend on its size.
TEST(Calibrate, CopiesInPiecesAsARunDoes) {
  HostDeviceOptions of_device{.capacity = 256_MiB, .threads = 1, .update_threads = 1};
  of_device.faults = std::make_shared<HostFaults>();
  std::atomic<bool> counts = false;
  std::atomic<int> copies = 0;
  of_device.faults->before_task = [&](std::string_view, std::string_view task) {
    if (counts && task == "copy to device") ++copies;
  };
  HostDevice device(of_device);
  const auto count_these = [&](std::string_view what) { counts = what == "copies to the device"; };
  calibrate(device, {.seconds_per_figure = no_time, .progress = count_these});
  constexpr int rounds = 4, pieces = 2;  // pieces of 32 MiB
  EXPECT_EQ(copies, rounds * pieces);
}

/// Counts what is queued of copies before it is first waited for.
class CountingDevice final : public testing::IdleDevice {
 public:
  void copy(void*, const void*, std::size_t bytes, CopyKind, StreamView stream) override {
    queued[stream.impl()->name()] += bytes;
  }
  bool wait_for(EventView, std::chrono::milliseconds) override {
    if (at_first_wait.empty()) at_first_wait = queued;
    has_waited = true;
    has_waited.notify_one();
    return true;
  }
  std::map<std::string, std::size_t> queued, at_first_wait;  ///< bytes by stream
  std::atomic<bool> has_waited = false;
};

// While the update has all cores, the thread that copies beside it may not run: the link is not to stand still for
// that.
TEST(CopyLoad, HasTwoRoundsQueuedBeforeItWaits) {
  CountingDevice device;
  const Stream up = device.make_stream("up"), down = device.make_stream("down");
  std::vector<std::byte> memory(4);
  constexpr std::size_t bytes = 40_MiB;  // in pieces, of which nothing is touched
  CopyLoad load(device, {&memory[0], &memory[1], &memory[2], &memory[3], bytes}, up, down);
  device.has_waited.wait(false);
  EXPECT_GT(load.end(), 0.0);
  EXPECT_EQ(device.at_first_wait["up"], 2 * bytes);
  EXPECT_EQ(device.at_first_wait["down"], 2 * bytes);
  EXPECT_EQ(device.queued["up"], device.queued["down"]);
}

/// Looks at what is to be multiplied, and multiplies nothing.
class WatchingOps final : public testing::IdleOps {
 public:
  void linear(TensorView x, TensorView w, TensorView, TensorView, StreamView) override {
    look(x.data, x.count());
    look(w.data, w.count());
    ++products;
    tokens = x.shape[0];
    channels = x.shape[1];
  }
  void linear_backward_input(TensorView dy, TensorView w, TensorView, bool, StreamView) override {
    look(dy.data, dy.count());
    look(w.data, w.count());
  }
  void linear_backward_weight(TensorView dy, TensorView x, TensorView, TensorView, StreamView) override {
    look(dy.data, dy.count());
    look(x.data, x.count());
  }
  void attention(HeadsView q, HeadsView, HeadsView, TensorView out, TensorView, const AttentionShape&,
                 StreamView) override {
    look(q.data, out.count());
  }

  bool looks = true;  ///< whether operands are read, which takes longer than a GPU would
  int products = 0;
  std::int64_t tokens = 0, channels = 0;  ///< rows and columns of the last product
  int operands = 0;
  int odd = 0;  ///< with a value that is zero or of no usual size, or with next to no different ones

 private:
  void look(const void* data, std::int64_t count) {
    if (!looks) return;
    const auto* values = static_cast<const bf16*>(data);
    bool usual = values[0].bits != values[1].bits || values[0].bits != values[2].bits;
    for (std::int64_t i = 0; i < count; ++i) {
      const float size = std::abs(numerics::bf16_to_float(values[i]));
      usual = usual && size >= 0.0625F && size <= 1.0F;
    }
    ++operands;
    odd += usual ? 0 : 1;
  }
};

class WatchingDevice final : public testing::IdleDevice {
 public:
  void copy(void* to, const void* from, std::size_t bytes, CopyKind, StreamView) override {
    std::memcpy(to, from, bytes);
  }
  void fill(void* to, unsigned char byte, std::size_t bytes, StreamView) override { std::memset(to, byte, bytes); }
  void synchronize(StreamView) override { ++waits; }
  WatchingOps& ops() noexcept override { return ops_; }

  int waits = 0;

 private:
  WatchingOps ops_;
};

// Between one that is waited for and the next a GPU would stand still, and narrow ones leave multiprocessors of a large
// one without work.
TEST(Calibrate, AGpuIsGivenManyProductsOfALargeModelBeforeItIsWaitedFor) {
  WatchingDevice device;
  device.ops().looks = false;
  const auto count_products = [&](std::string_view what) {
    if (what == "matrix products") device.waits = 0;
    if (what == "attention") {
      EXPECT_GT(device.ops().products, 10 * device.waits);
    }
  };
  EXPECT_ANY_THROW(calibrate(device, {.seconds_per_figure = no_time, .working_set = 1, .progress = count_products}));
  EXPECT_GT(device.ops().products, 0);
  EXPECT_EQ(device.ops().channels, 4096) << "of the least that is measured over";
  EXPECT_EQ(device.ops().tokens, 2048);
}

// A GPU takes less power for zeros, and multiplies them up to an eighth faster.
TEST(Calibrate, MultipliesNoZeros) {
  WatchingDevice device;
  EXPECT_ANY_THROW(calibrate(device, {.seconds_per_figure = no_time, .working_set = 1})) << "it does nothing, too fast";
  EXPECT_GT(device.ops().operands, 0);
  EXPECT_EQ(device.ops().odd, 0);
}

TEST(Calibrate, LeavesNothingInTheDisksFolder) {
  const std::filesystem::path folder = std::filesystem::path(::testing::TempDir()) / "calibrated disk";
  HostDevice device = small_device();
  const MachineProfile profile = calibrate(device, {.seconds_per_figure = no_time, .disk_folder = folder});
  EXPECT_TRUE(profile.disk.known());
  EXPECT_TRUE(std::filesystem::is_empty(folder));
  std::filesystem::remove(folder);
}

TEST(Calibrate, RefusesADeviceWithoutRoom) {
  HostDevice device({.capacity = 16_MiB, .threads = 1, .update_threads = 1});
  EXPECT_THROW(calibrate(device, {.seconds_per_figure = no_time}), PlanError);
}

// Less memory would measure caches: on processors with hundreds of MiB of them every rate comes out too high.
TEST(Calibrate, TakesMoreThanCachesHoldWhereThereIsRoom) {
  Topology machine;
  machine.available_memory_bytes = 64_GiB;
  EXPECT_EQ(calibrated_bytes(machine, 0, 16_GiB, 0), 256_MiB) << "caches of unknown size";
  machine.cache_bytes = 32_MiB;
  EXPECT_EQ(calibrated_bytes(machine, 0, 16_GiB, 0), 256_MiB);
  EXPECT_EQ(calibrated_bytes(machine, 96_MiB, 16_GiB, 0), 4 * 96_MiB) << "a GPU of large caches";
  machine.cache_bytes = 480_MiB;
  EXPECT_EQ(calibrated_bytes(machine, 0, 16_GiB, 0), 4 * 480_MiB);
  EXPECT_EQ(calibrated_bytes(machine, 0, 4_GiB, 0), 1_GiB) << "a quarter of the device";
  EXPECT_EQ(calibrated_bytes(machine, 0, 16_GiB, 700_MiB), 700_MiB) << "what the run has";
  EXPECT_EQ(calibrated_bytes(machine, 0, 16_GiB, 1_MiB), 256_MiB);
  machine.available_memory_bytes = 8_GiB;
  EXPECT_EQ(calibrated_bytes(machine, 0, 16_GiB, 0), 1_GiB) << "an eighth of what the host has";
  EXPECT_EQ(calibrated_bytes(machine, 0, 64_MiB + 5, 0) % arena_alignment, 0U);
}

// A large model's state is tens of GiB, and every figure takes the longer for it.
TEST(Calibrate, TakesNoMoreForALargeModelThanCachesMatterFor) {
  Topology machine;
  machine.available_memory_bytes = 128_GiB;
  EXPECT_EQ(calibrated_bytes(machine, 0, 80_GiB, 24_GiB), 256_MiB) << "caches of unknown size";
  machine.cache_bytes = 480_MiB;
  EXPECT_EQ(calibrated_bytes(machine, 0, 80_GiB, 24_GiB), 4 * 480_MiB);
  EXPECT_EQ(calibrated_bytes(machine, 960_MiB, 80_GiB, 24_GiB), 4 * 960_MiB);
}

std::string refusal(std::size_t available, std::size_t room) {
  Topology machine;
  machine.available_memory_bytes = available;
  try {
    calibrated_bytes(machine, 0, room, 0);
  } catch (const PlanError& error) {
    return error.what();
  }
  return "";
}

TEST(Calibrate, NamesWhoseMemoryIsShort) {
  EXPECT_THAT(refusal(64_GiB, 31_MiB),
              AllOf(HasSubstr("31.0 MiB are free on the device"), HasSubstr("32.0 MiB of --device-memory")));
  EXPECT_THAT(refusal(63_MiB, 16_GiB), AllOf(HasSubstr("63.0 MiB of the host's memory"), HasSubstr("needs 64.0 MiB")));
  EXPECT_EQ(refusal(64_MiB, 32_MiB), "");
}

}  // namespace
}  // namespace tandem
