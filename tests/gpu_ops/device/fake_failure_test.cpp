// Failures reach whoever waits: at every call of the runtime, and in work that is queued.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/error.hpp"
#include "gpu_ops/device/native_stream.hpp"
#include "gpu_ops/device/runtime.hpp"
#include "gpu_ops/emulation/grid.hpp"
#include "tests/gpu_ops/device/device_testing.hpp"
#include "tests/gpu_ops/device/fake_device.hpp"

namespace tandem {
namespace {

using namespace literals;
using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using testing::open_fake_device;
using ::testing::ThrowsMessage;

/// A little of everything that the device is asked for. Returns whether what came back is right.
bool use_everything(CudaDevice& device) {
  constexpr std::size_t bytes = 5000;
  const MemoryBlock block = device.allocate(bytes, "block");
  const MemoryBlock host = device.allocate_pinned(3_MiB, "host");
  std::memset(host.data(), 5, bytes);
  Stream up = device.make_stream("up");
  Stream down = device.make_stream("down");
  Event arrived = device.make_event();
  std::mutex mutex;
  int calls = 0;
  std::exception_ptr failure;
  const auto count = [&](std::exception_ptr error) {
    const std::lock_guard lock(mutex);
    ++calls;
    if (error) failure = std::move(error);
  };
  std::vector<std::byte> back(bytes);
  bool waited = false;
  int asked = 0;
  try {
    device.copy(block.data(), host.data(), bytes, CopyKind::host_to_device, up);
    device.record(arrived, up);
    device.call_after(up, count);
    ++asked;
    device.wait(down, arrived);
    device.copy(back.data(), block.data(), bytes, CopyKind::device_to_host, down);
    device.fill_zero(block.data(), bytes, down);
    device.call_after(down, count);
    ++asked;
    waited = device.wait_for(arrived, 60s);
    device.synchronize(up);
    device.synchronize(down);
  } catch (...) {
    const std::lock_guard lock(mutex);
    failure = std::current_exception();
  }
  up = Stream();
  down = Stream();
  // Whoever asked keeps memory until the call comes: it comes whatever has happened.
  EXPECT_EQ(calls, asked);
  if (failure) std::rethrow_exception(failure);
  return waited && back == std::vector<std::byte>(bytes, std::byte{5});
}

std::int64_t calls_of_a_run() {
  fake_cuda::install({});
  fake_cuda::fail_call(-1, cudaSuccess);
  EXPECT_TRUE(use_everything(*open_fake_device({.capacity = 1_MiB})));
  return fake_cuda::calls();
}

class EveryCall : public ::testing::TestWithParam<cudaError_t> {};

TEST_P(EveryCall, ThatFailsOnceIsANamedErrorAndLeavesNothingBehind) {
  const std::int64_t calls = calls_of_a_run();
  ASSERT_GT(calls, 60);
  int failures = 0;
  int reached = 0;  // a wait asks as often as it lasts, so the first run may have had more calls than the others
  for (std::int64_t position = 0; position < calls; ++position) {
    fake_cuda::install({});
    fake_cuda::fail_call(position, GetParam());
    try {
      EXPECT_TRUE(use_everything(*open_fake_device({.capacity = 1_MiB}))) << "call " << position;
    } catch (const DeviceError& error) {
      ++failures;
      EXPECT_THAT(error.what(), ::testing::ContainsRegex("device 'cuda|cuda:0|'host'")) << "call " << position;
    } catch (const PlanError& error) {
      ++failures;
      EXPECT_EQ(GetParam(), cudaErrorMemoryAllocation) << error.what();
    }
    if (fake_cuda::calls() > position) ++reached;
    EXPECT_EQ(fake_cuda::census(), fake_cuda::Census()) << "call " << position;
    EXPECT_THAT(fake_cuda::complaints(), IsEmpty()) << "call " << position;
  }
  EXPECT_GT(reached, 60);
  // The rest are calls that give something back, about which nobody can do anything.
  EXPECT_GT(failures, reached / 2);
}

INSTANTIATE_TEST_SUITE_P(Codes, EveryCall,
                         ::testing::Values(cudaErrorInvalidValue, cudaErrorMemoryAllocation, cudaErrorECCUncorrectable),
                         [](const auto& each) {
                           return each.param == cudaErrorInvalidValue       ? "Refused"
                                  : each.param == cudaErrorMemoryAllocation ? "OutOfMemory"
                                                                            : "DeviceLost";
                         });

TEST(CudaFailure, OfOneCallFailsItsStreamForGoodAndNoOther) {
  fake_cuda::install({});
  const auto device = open_fake_device();
  const MemoryBlock block = device->allocate(64, "block");
  std::vector<std::byte> host(64, std::byte{9});
  Stream bad = device->make_stream("bad");
  Stream good = device->make_stream("good");
  fake_cuda::fail_call("cudaMemcpyAsync", 0, cudaErrorInvalidValue);
  EXPECT_NO_THROW(device->copy(block.data(), host.data(), 64, CopyKind::host_to_device, bad)) << "asynchronous";
  EXPECT_THAT([&] { device->synchronize(bad); },
              ThrowsMessage<DeviceError>(AllOf(HasSubstr("cuda:0: queueing a copy: invalid argument"))));
  device->fill_zero(block.data(), 64, good);
  device->synchronize(good);
  device->copy(block.data(), host.data(), 64, CopyKind::host_to_device, bad);
  EXPECT_THROW(device->synchronize(bad), DeviceError) << "later work is dropped";
  EXPECT_THROW((void)native_stream(bad), DeviceError) << "kernels too";
  device->copy(host.data(), block.data(), 64, CopyKind::device_to_host, good);
  device->synchronize(good);
  EXPECT_EQ(host, std::vector<std::byte>(64));
}

TEST(CudaFailure, TravelsThroughEventsFromStreamToStream) {
  fake_cuda::install({});
  const auto device = open_fake_device();
  const MemoryBlock block = device->allocate(64, "block");
  Stream a = device->make_stream("a");
  Stream b = device->make_stream("b");
  Stream c = device->make_stream("c");
  Event before = device->make_event();
  Event of_a = device->make_event();
  Event of_b = device->make_event();
  device->record(before, a);
  fake_cuda::fail_call("cudaMemsetAsync", 0, cudaErrorInvalidValue);
  device->fill_zero(block.data(), 64, a);
  device->record(of_a, a);
  device->wait(b, of_a);
  device->record(of_b, b);
  device->wait(c, of_b);
  bool told = false;
  device->call_after(c, [&](std::exception_ptr error) { told = error != nullptr; });
  EXPECT_THROW(device->synchronize(c), DeviceError);
  EXPECT_THROW(device->wait_for(of_b, 60s), DeviceError);
  EXPECT_TRUE(device->wait_for(before, 60s)) << "recorded before the failure";
  c = Stream();
  EXPECT_TRUE(told);
}

TEST(CudaFailure, ARecordMayFollowAFailureOnAnotherStream) {
  fake_cuda::install({});
  const auto device = open_fake_device();
  const MemoryBlock block = device->allocate(64, "block");
  Stream bad = device->make_stream("bad");
  Stream good = device->make_stream("good");
  Event event = device->make_event();
  fake_cuda::fail_call("cudaMemsetAsync", 0, cudaErrorInvalidValue);
  device->fill_zero(block.data(), 64, bad);
  device->record(event, bad);
  EXPECT_THROW(device->wait_for(event, 60s), DeviceError);
  device->record(event, good);
  EXPECT_TRUE(device->wait_for(event, 60s));
}

TEST(CudaFailure, AFaultInQueuedWorkLosesTheDevice) {
  fake_cuda::install({});
  const auto device = open_fake_device();
  Stream a = device->make_stream("a");
  Stream b = device->make_stream("b");
  std::atomic<bool> open{false};
  emulation::enqueue("planted", native_stream(a), [&] {
    while (!open) std::this_thread::sleep_for(1ms);
    throw std::runtime_error("an illegal access");
  });
  bool ran = false;
  emulation::enqueue("planted", native_stream(a), [&] { ran = true; });
  std::exception_ptr told;
  device->call_after(a, [&](std::exception_ptr error) { told = error; });
  open = true;
  EXPECT_THAT([&] { device->synchronize(a); },
              ThrowsMessage<DeviceError>(AllOf(HasSubstr("cuda:0: device lost"), HasSubstr("cudaErrorLaunchFailure"),
                                               HasSubstr("start again from the last checkpoint"))));
  EXPECT_THROW(device->synchronize(b), DeviceError) << "every stream of it";
  EXPECT_THROW((void)device->make_event(), DeviceError);
  EXPECT_THROW((void)device->make_stream("c"), DeviceError);
  EXPECT_THROW((void)device->allocate(1, "block"), DeviceError);
  a = Stream();
  EXPECT_FALSE(ran);
  ASSERT_NE(told, nullptr) << "the callback came all the same";
  EXPECT_THROW(std::rethrow_exception(told), DeviceError);
}

TEST(CudaFailure, ThatALaunchReportsIsNamedWithTheKernel) {
  const auto report_of = [](cudaError_t code, bool lost) {
    fake_cuda::install({});
    const auto device = open_fake_device();
    const MemoryBlock sum = device->allocate(256, "sum");
    const MemoryBlock gradient = device->allocate(128, "gradient");
    Stream stream = device->make_stream("a");
    const auto launch = [&] {
      device->ops().round(static_cast<const float*>(sum.data()), static_cast<bf16*>(gradient.data()), 64, stream);
    };
    fake_cuda::fail_call("launch", 0, code);
    std::string report = "none";
    try {
      launch();
    } catch (const DeviceError& error) {
      report = error.what();
    }
    EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "the next launch would be blamed";
    if (lost) {
      EXPECT_THROW(launch(), DeviceError);
    } else {
      EXPECT_NO_THROW(launch()) << "a refusal is not for ever";
    }
    return report;
  };
  EXPECT_THAT(report_of(cudaErrorInvalidValue, false),
              AllOf(HasSubstr("cuda:0: launching kernel round: invalid argument"), Not(HasSubstr("lost"))));
  EXPECT_THAT(report_of(cudaErrorLaunchFailure, true),
              AllOf(HasSubstr("cuda:0: device lost: launching kernel round"), HasSubstr("cudaErrorLaunchFailure"),
                    HasSubstr("start again from the last checkpoint")));
}

TEST(CudaFailure, OfAKernelThatTheDriverCannotCompileSaysWhatWould) {
  const auto advice_of = [](cudaError_t code) {
    fake_cuda::install({});
    const auto device = open_fake_device();
    fake_cuda::fail_call("cudaMalloc", 0, code);
    try {
      (void)device->allocate(64, "block");
    } catch (const DeviceError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_THAT(advice_of(cudaErrorUnsupportedPtxVersion), AllOf(HasSubstr("update it"), Not(HasSubstr("lost"))));
  EXPECT_THAT(advice_of(cudaErrorNoKernelImageForDevice), HasSubstr("CMAKE_CUDA_ARCHITECTURES"));
  EXPECT_THAT(advice_of(cudaErrorLaunchTimeout), AllOf(HasSubstr("device lost"), HasSubstr("draws a screen")));
}

TEST(CudaFailure, AfterWhichCudaWantsANewProcessIsALostDevice) {
  // Codes of which the runtime's header says so.
  for (const cudaError_t code : {cudaErrorContained, cudaErrorIllegalAddress, cudaErrorLaunchTimeout, cudaErrorAssert,
                                 cudaErrorHardwareStackError, cudaErrorIllegalInstruction, cudaErrorMisalignedAddress,
                                 cudaErrorInvalidAddressSpace, cudaErrorInvalidPc, cudaErrorLaunchFailure,
                                 cudaErrorTensorMemoryLeak, cudaErrorMpsClientTerminated, cudaErrorExternalDevice}) {
    fake_cuda::install({});
    const auto device = open_fake_device();
    fake_cuda::fail_call("cudaMalloc", 0, code);
    EXPECT_THAT([&] { (void)device->allocate(64, "block"); },
                ThrowsMessage<DeviceError>(
                    AllOf(HasSubstr("cuda:0: device lost"), HasSubstr("start again from the last checkpoint"))))
        << code;
  }
}

TEST(CudaFailure, OfALibraryIsALostDeviceWhereItsStreamSaysSo) {
  fake_cuda::install({});
  const auto device = open_fake_device();
  Stream stream = device->make_stream("a");
  CUstream_st* const native = native_stream(stream);
  std::atomic<bool> open{false};
  emulation::enqueue("gate", native, [&] {
    while (!open) std::this_thread::sleep_for(1ms);
    throw std::runtime_error("an illegal access");
  });
  EXPECT_NO_THROW(gpu::runtime::require_alive(native, "launching a matrix product")) << "busy is alive";
  open = true;
  EXPECT_THROW(device->synchronize(stream), DeviceError);
  EXPECT_THAT([&] { gpu::runtime::require_alive(native, "launching a matrix product"); },
              ThrowsMessage<DeviceError>(HasSubstr("cuda:0: device lost: launching a matrix product")));
}

TEST(CudaFailure, ACallComesOnlyOnceWorkQueuedBeforeTheFailureIsDone) {
  fake_cuda::install({});
  const auto device = open_fake_device();
  const MemoryBlock block = device->allocate(64, "block");
  Stream stream = device->make_stream("a");
  std::atomic<bool> open{false};
  std::atomic<bool> done{false};
  emulation::enqueue("planted", native_stream(stream), [&] {
    while (!open) std::this_thread::sleep_for(1ms);
    done = true;
  });
  fake_cuda::fail_call("cudaMemsetAsync", 0, cudaErrorInvalidValue);
  device->fill_zero(block.data(), 64, stream);
  std::atomic<int> was_done{-1};
  device->call_after(stream, [&](std::exception_ptr) { was_done = done ? 1 : 0; });
  std::this_thread::sleep_for(5ms);
  open = true;
  stream = Stream();
  EXPECT_EQ(was_done, 1);
}

TEST(CudaFailure, MemoryThatOthersTookIsAPlanErrorThatNamesWhatIsHeld) {
  fake_cuda::install({});
  const auto device = open_fake_device({.capacity = 100_MiB});
  const MemoryBlock block = device->allocate(1_MiB, "weights");
  fake_cuda::fail_call("cudaMalloc", 0, cudaErrorMemoryAllocation);
  try {
    (void)device->allocate(10_MiB, "activations");
    FAIL();
  } catch (const PlanError& error) {
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr("memory of cuda:0 is taken: 'activations' needs 10.0 MiB"),
                      HasSubstr("are free, this run holds: 'weights' 1.0 MiB"), HasSubstr("lower --device-memory")));
  }
  EXPECT_EQ(device->allocated_bytes(), 1_MiB);
  EXPECT_NO_THROW((void)device->allocate(10_MiB, "activations")) << "a refusal is not for ever";
}

TEST(CudaFailure, OfPinningSaysWhatToDo) {
  fake_cuda::install({});
  const auto device = open_fake_device();
  fake_cuda::fail_call("cudaHostRegister", 1, cudaErrorMemoryAllocation);
  EXPECT_THAT([&] { (void)device->allocate_pinned(5_MiB, "state"); },
              ThrowsMessage<DeviceError>(AllOf(HasSubstr("cannot pin 5.0 MiB for 'state'"), HasSubstr("out of memory"),
                                               HasSubstr("--host-memory"))));
  EXPECT_EQ(device->pinned_bytes(), 0U);
  EXPECT_EQ(fake_cuda::census().registrations, 0) << "the first piece too";
}

struct Refused {
  std::size_t pinnable;
  std::string said;
  std::size_t pinned;
  int registrations;
  std::size_t pinned_later;  ///< pinned bytes of a block of 64 KiB that is allocated later
};

class CudaPinningRefused : public ::testing::TestWithParam<Refused> {};

/// A block of 11 MiB and 7 bytes is pinned in pieces of 2 MiB that halve down to an eighth; the last one is left to the
/// driver.
TEST_P(CudaPinningRefused, LeavesTheRestOfABlockPageableWhereThatIsAsked) {
  const Refused& expected = GetParam();
  fake_cuda::install({.pinnable = expected.pinnable});
  std::string said;
  const auto device = open_fake_device({.pageable = [&](const std::string& what) { said = what; }});
  {
    MemoryBlock block = device->allocate_pinned(11_MiB + 7, "state");
    EXPECT_THAT(said, AllOf(HasSubstr(expected.said), HasSubstr("out of memory"), HasSubstr("lower --host-memory")));
    EXPECT_EQ(device->pinned_bytes(), expected.pinned);
    EXPECT_EQ(device->pageable_bytes(), block.bytes() - expected.pinned);
    EXPECT_EQ(fake_cuda::census().registrations, expected.registrations);
    // Copies reach it, from any byte.
    const MemoryBlock on_device = device->allocate(block.bytes(), "copy");
    const Stream stream = device->make_stream("copies");
    auto* const bytes = static_cast<unsigned char*>(block.data());
    const auto value = [](std::size_t i) { return static_cast<unsigned char>(i % 251); };
    for (std::size_t i = 0; i < block.bytes(); ++i) bytes[i] = value(i);
    device->copy(on_device.data(), bytes, 3, CopyKind::host_to_device, stream);
    device->copy(static_cast<std::byte*>(on_device.data()) + 3, bytes + 3, block.bytes() - 3, CopyKind::host_to_device,
                 stream);
    device->synchronize(stream);
    std::memset(bytes, 0, block.bytes());
    device->copy(bytes, on_device.data(), block.bytes(), CopyKind::device_to_host, stream);
    device->synchronize(stream);
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < block.bytes(); ++i) wrong += bytes[i] != value(i);
    EXPECT_EQ(wrong, 0U);
    const MemoryBlock later = device->allocate_pinned(64_KiB, "batches");
    EXPECT_EQ(device->pinned_bytes(), expected.pinned + expected.pinned_later);
  }
  EXPECT_EQ(device->pinned_bytes(), 0U);
  EXPECT_EQ(device->pageable_bytes(), 0U);
  EXPECT_EQ(fake_cuda::census().registrations, 0);
  EXPECT_THAT(fake_cuda::complaints(), IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(
    Limits, CudaPinningRefused,
    ::testing::Values(Refused{0, "cannot pin 11.0 MiB for 'state'", 0, 0, 0},
                      Refused{200_KiB, "cannot pin 11.0 MiB for 'state'", 0, 0, 64_KiB},
                      Refused{5_MiB, "cannot pin 7.0 MiB of 11.0 MiB for 'state'", 4_MiB, 2, 64_KiB},
                      Refused{6_MiB - 1, "cannot pin 5.5 MiB of 11.0 MiB for 'state'", 5_MiB + 512_KiB, 4, 64_KiB},
                      Refused{11_MiB, "cannot pin 512.0 KiB of 11.0 MiB for 'state'", 10_MiB + 512_KiB, 6, 64_KiB}),
    [](const auto& each) { return std::to_string(each.param.pinnable); });

TEST(CudaPinned, IsRegisteredInLargePieces) {
  fake_cuda::install({});
  const auto device = open_fake_device({.pinned_piece = 4_MiB});
  const MemoryBlock block = device->allocate_pinned(11_MiB + 7, "state");
  EXPECT_EQ(fake_cuda::census().registrations, 3);
  EXPECT_EQ(fake_cuda::largest_registration(), 4_MiB);
}

}  // namespace
}  // namespace tandem
