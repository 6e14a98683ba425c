// The engine on the CUDA device, where the fake shows what a GPU cannot be asked to do.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <exception>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>

#include "core/base/error.hpp"
#include "core/base/stall.hpp"
#include "gpu_ops/device/native_stream.hpp"
#include "gpu_ops/emulation/grid.hpp"
#include "offload/engine/engine.hpp"
#include "tests/gpu_ops/device/fake_device.hpp"
#include "tests/gpu_ops/device/toy_machine.hpp"
#include "tests/offload/least_memory.hpp"
#include "tests/offload/ranks/toy_group.hpp"

namespace tandem {
namespace {

using namespace literals;
using ::testing::IsEmpty;
using testing::toy;
using testing::toy_machine;
using testing::ToyOptions;
using testing::ToyResult;
using testing::ToyTrainer;
using testing::train_toy;

class FakeMachine : public ::testing::Test {
 protected:
  void TearDown() override { toy_machine() = {.seed = 7}; }
};

using EngineOnCuda = FakeMachine;

TEST_F(EngineOnCuda, GivesTheBitsOfTheHostDevice) {
  for (const char* policy : {"device", "host", "interleave:2,resident=0.4", "stream"}) {
    ToyOptions o = toy(policy);
    o.micro_batches = 2;
    const ToyResult on_cuda = train_toy(o);
    EXPECT_THAT(fake_cuda::complaints(), IsEmpty());
    o.make_device = testing::make_toy_host_device;
    const ToyResult on_host = train_toy(o);
    EXPECT_EQ(on_cuda.digest, on_host.digest) << policy;
    EXPECT_EQ(on_cuda.norms, on_host.norms) << policy;
    EXPECT_EQ(on_cuda.losses, on_host.losses) << policy;
  }
}

// The legacy default stream by both handles, and this thread's own.
TEST_F(EngineOnCuda, GivesTheSameBitsOnDefaultStreams) {
  const char* policies[] = {"device", "host", "interleave:2,resident=0.4", "stream"};
  const ToyResult expected = train_toy(toy("device"));
  for (const std::uintptr_t handle : {0U, 1U, 2U}) {
    for (unsigned seed = 0; seed < 8; ++seed) {
      toy_machine() = {.seed = 300 + 7 * seed, .longest_delay_us = 60};
      ToyOptions o = toy(policies[seed % 4]);
      o.make_stream = [handle](Device& device) { return device.wrap_stream(reinterpret_cast<void*>(handle)); };
      EXPECT_EQ(train_toy(o).digest, expected.digest) << "handle " << handle << ", seed " << seed;
      EXPECT_THAT(fake_cuda::complaints(), IsEmpty()) << "handle " << handle << ", seed " << seed;
    }
  }
}

// The arena and all else on the device, as much as the plan says, and all of it given back.
TEST_F(EngineOnCuda, TakesItsMemoryFromTheCallersAllocator) {
  const ToyResult expected = train_toy(toy("interleave:2"));
  std::map<void*, std::size_t> given;
  std::size_t held = 0;
  ToyOptions o = toy("interleave:2");
  o.device.allocator = {.allocate =
                            [&](std::size_t bytes, std::size_t) {
                              void* data = nullptr;
                              cudaMalloc(&data, bytes);
                              given[data] = bytes;
                              held += bytes;
                              return data;
                            },
                        .free =
                            [&](void* data, std::size_t bytes) {
                              EXPECT_EQ(given.at(data), bytes);
                              given.erase(data);
                              cudaFree(data);
                            }};
  {
    ToyTrainer t(o);
    EXPECT_EQ(held, t.engine().device_bytes());
    EXPECT_EQ(held, t.device().allocated_bytes());
    EXPECT_EQ(t.run().digest, expected.digest);
  }
  EXPECT_THAT(given, IsEmpty());
  EXPECT_THAT(fake_cuda::complaints(), IsEmpty());
}

// Behind the caller's products a streamed update would wait, and with it the buffer of state that it has.
TEST_F(EngineOnCuda, UpdatesGoBeforeTheCallersKernels) {
  train_toy(toy("stream"));
  const std::map<std::string, int> priorities = fake_cuda::priorities();
  EXPECT_TRUE(priorities.contains("device update"));
  EXPECT_GT(priorities.size(), 3U);
  for (const auto& [stream, priority] : priorities) EXPECT_EQ(priority < 0, stream == "device update") << stream;
}

TEST_F(EngineOnCuda, SurvivesStreamsThatRunAheadAndLag) {
  const char* policies[] = {"host", "static:0.5", "interleave:2", "interleave:2,resident=0.4", "stream"};
  const ToyResult expected = train_toy(toy("device"));
  for (unsigned seed = 0; seed < 20; ++seed) {
    toy_machine() = {.seed = 100 + 7 * seed, .longest_delay_us = 60};
    ToyOptions o = toy(policies[seed % 5]);
    o.offload.prefetch_layers = 1 + static_cast<int>(seed % 3);
    o.offload.subgroup_size = 1 + 1500 * (seed % 4);
    o.offload.resident_layers = static_cast<int>(seed % 4);
    EXPECT_EQ(train_toy(o).digest, expected.digest) << "seed " << seed;
    EXPECT_THAT(fake_cuda::complaints(), IsEmpty()) << "seed " << seed;
  }
}

/// A card of just the memory that the plan is to take: the driver's share of it is free when it is wanted.
TEST_F(EngineOnCuda, FitsOnACardOfTheSizePlannedWithItsPageTables) {
  ParameterLayout layout;
  for (int i = 0; i < 8; ++i) layout.add_layer("h." + std::to_string(i)).add("w", {1 << 19});
  OffloadOptions options;
  options.policy = parse_policy("host");
  const PlanningFacts facts =
      testing::on_least_memory(layout, options, {.device_capacity = 64_MiB, .pinned_per_page_table = 512});
  const Plan plan = make_plan(layout, options, facts);
  ASSERT_GE(plan.memory.host_bytes(), 48_MiB);
  constexpr std::size_t context = 32_MiB, code = 32_MiB;
  const std::size_t all = context + code + facts.device_capacity;
  const fake_cuda::Card card{.memory = all, .taken = context, .code = code};
  fake_cuda::install({.cards = {card, card}});
  CudaDeviceOptions whole = testing::cuda_options({.ordinal = 1});  // others open the first one
  whole.memory = all;
  CudaDevice device(std::move(whole));
  ASSERT_EQ(device.info().capacity, facts.device_capacity);
  OffloadEngine engine(device, layout, options, plan);
  const MemoryBlock rest =
      device.allocate(facts.device_capacity - plan.memory.device_bytes() - plan.page_tables, "rest");
  const Stream stream = device.make_stream("a");
  EXPECT_NO_THROW(emulation::enqueue("first", native_stream(stream), [] {}));
}

/// Trains on two cards, of which the second one is lost as it records for its peer for the n-th time, and ends the
/// program.
[[noreturn]] void lose_a_card_at(int record) {
  set_stall_handler([](const StalledError& error) {
    std::fprintf(stderr, "%s\n", error.what());
    ::_exit(static_cast<int>(error.exit_code()));
  });
  ::alarm(60);
  toy_machine() = {.cards = {fake_cuda::Card{}, fake_cuda::Card{}}, .lost_marks_stay = true};
  ToyOptions o = toy("host");
  o.offload.watchdog_seconds = 1.0;
  o.device.faults = std::make_shared<HostFaults>();
  o.device.faults->before_task = [left = record](std::string_view stream, std::string_view work) mutable {
    const bool counts = fake_cuda::current_context() == 1 && stream == "peers" && work == "record";
    if (counts && --left == 0) throw std::runtime_error("a fault");
  };
  const auto train = [](ToyTrainer& t, int) {
    try {
      t.run();
    } catch (...) {
      t.end_engine();
      throw;
    }
  };
  const testing::Failures failures = testing::run_toy_group(
      2, [&](int) { return o; }, train);
  const bool told = std::ranges::all_of(failures, [](const std::exception_ptr& failure) { return failure != nullptr; });
  std::fprintf(stderr, "no stream of the other card waited\n");
  ::_exit(told ? static_cast<int>(ExitCode::device) : 0);
}

// An event recorded on a lost card may never pass for another card's streams: an engine that waits for them at its end
// tells.
TEST_F(EngineOnCuda, ALostCardThatKeepsItsPeersWaitingEndsTheProgram) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  for (const int record : {2, 6, 12, 20}) {
    EXPECT_EXIT(lose_a_card_at(record), ::testing::ExitedWithCode(5), "made no progress for 1 s|no stream of the other")
        << record;
  }
}

/// Bytes of a plan that copies between host and device touch.
std::size_t copied_bytes(const Plan& plan) {
  std::size_t bytes = 0;
  for (const MemoryEntry& entry : plan.memory.entries) {
    if (entry.place != Place::device && (entry.name == "weights" || entry.name == "gradients")) bytes += entry.bytes;
  }
  for (const Subgroup& s : plan.subgroups) {
    if (s.tier == Tier::host && s.updater == Updater::device) bytes += booked_state_bytes(s.count(), plan.state);
  }
  return bytes;
}

ToyOptions large_toy(const char* policy) {
  ToyOptions o = toy(policy);
  o.width = 300'000;
  o.offload.subgroup_size = 100'000;
  o.offload.resident_layers = 0;
  o.device.pageable = [](const std::string&) {};
  return o;
}

TEST_F(EngineOnCuda, GivesTheSameBitsHoweverMuchOfItsMemoryCanBePinned) {
  ToyOptions o = large_toy("interleave:2,resident=0.2");
  o.micro_batches = 2;
  const ToyResult expected = train_toy(o);
  for (const std::size_t pinnable : {std::size_t{0}, 1_MiB, 3_MiB, 7_MiB, 13_MiB}) {
    toy_machine().pinnable = pinnable;
    ToyTrainer trainer(o);
    EXPECT_EQ(trainer.run().digest, expected.digest) << pinnable;
    EXPECT_LE(trainer.engine().plan().memory.bytes_in(Place::pinned), pinnable);
    EXPECT_EQ(trainer.engine().plan().memory.host_bytes(), expected.plan.memory.host_bytes());
    EXPECT_GT(fake_cuda::copies().pageable_bytes, 100'000U) << pinnable;
    EXPECT_THAT(fake_cuda::complaints(), IsEmpty()) << pinnable;
  }
}

TEST_F(EngineOnCuda, PinsWhatIsCopiedFirst) {
  const ToyOptions o = large_toy("interleave:2");
  const Plan plan = train_toy(o).plan;
  toy_machine().pinnable = copied_bytes(plan) + 4_MiB;  // the last piece is left to the driver
  ASSERT_GT(plan.memory.bytes_in(Place::pinned), toy_machine().pinnable + 1_MiB);
  ToyTrainer trainer(o);
  EXPECT_GT(trainer.engine().plan().memory.bytes_in(Place::pageable), 1_MiB);
  const std::size_t before = fake_cuda::copies().pageable_bytes;
  trainer.run();
  EXPECT_GT(fake_cuda::copies().to_host, 0);
  EXPECT_LT(fake_cuda::copies().pageable_bytes - before, 1000U) << "losses; the engine's own memory by the CPU alone";
}

/// CUDA holds the caller within a copy of pageable memory to the host until it is made. While one is held up here, the
/// weights of further layers are on their way.
TEST_F(EngineOnCuda, CopiesThatBlockHoldUpNoneInTheOtherDirection) {
  ToyOptions o = large_toy("host");
  o.layers = 16;
  o.width = 30'000;
  toy_machine().pinnable = 0;
  std::atomic<int> passed = 0;
  o.device.faults = std::make_shared<HostFaults>();
  o.device.faults->before_task = [&](std::string_view, std::string_view work) {
    if (work != "copy to host" || passed > 0) return;
    const std::int64_t before = fake_cuda::copies().to_device;
    for (int i = 0; i < 50 && fake_cuda::copies().to_device == before; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    if (fake_cuda::copies().to_device > before) ++passed;
  };
  train_toy(o);
  EXPECT_GT(passed, 0);
}

class EngineEveryCall : public ::testing::TestWithParam<cudaError_t> {};

TEST_P(EngineEveryCall, ThatFailsOnceIsToldAndLeavesNothingBehind) {
  ToyOptions o = toy("interleave:2,resident=0.3");
  o.offload.resident_layers = 1;
  o.steps = 2;
  const ToyResult expected = train_toy(o);
  int failures = 0;
  int runs = 0;
  for (std::int64_t position = 0;; position += 23) {
    ++runs;
    bool reached = false;
    try {
      ToyTrainer t(o);
      fake_cuda::fail_call(position, GetParam());
      const ToyResult result = t.run();
      reached = fake_cuda::calls() > position;
      // A call that only gives back, or is tried again, may fail unseen: then nothing is wrong either.
      EXPECT_EQ(result.digest, expected.digest) << "call " << position;
    } catch (const DeviceError&) {
      reached = true;
      ++failures;
    } catch (const PlanError& error) {
      reached = true;
      ++failures;
      EXPECT_EQ(GetParam(), cudaErrorMemoryAllocation) << error.what();
    }
    EXPECT_EQ(fake_cuda::census(), fake_cuda::Census()) << "call " << position;
    EXPECT_THAT(fake_cuda::complaints(), IsEmpty()) << "call " << position;
    if (!reached) break;
  }
  EXPECT_GT(runs, 20);
  EXPECT_GT(failures, runs / 2);
}

INSTANTIATE_TEST_SUITE_P(Codes, EngineEveryCall,
                         ::testing::Values(cudaErrorInvalidValue, cudaErrorMemoryAllocation, cudaErrorLaunchFailure),
                         [](const auto& each) {
                           return each.param == cudaErrorInvalidValue       ? "Refused"
                                  : each.param == cudaErrorMemoryAllocation ? "OutOfMemory"
                                                                            : "DeviceLost";
                         });

}  // namespace
}  // namespace tandem
