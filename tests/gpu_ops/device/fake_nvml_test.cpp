// Facts that the driver's management library adds: who holds memory, and how much context and libraries take.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "core/base/error.hpp"
#include "gpu_ops/device/cuda_device_nvml.hpp"
#include "gpu_ops/device/shared_library.hpp"
#include "tests/gpu_ops/device/fake_device.hpp"

namespace tandem {
namespace {

using namespace literals;
using ::testing::AllOf;
using testing::cuda_options;
using ::testing::HasSubstr;
using testing::open_fake_device;

constexpr const char* bus = "ffff:00:00.0";

class FakeNvml : public ::testing::Test {
 protected:
  void SetUp() override {
    ::setenv("TANDEM_CUDA_LIBS", "/nowhere:" TANDEM_FAKE_NVML_FOLDER, 1);
    const auto library = gpu::SharedLibrary::find({"libnvidia-ml.so.1"});
    ASSERT_TRUE(library) << "found where TANDEM_CUDA_LIBS says";
    set_ = library->function<void(bool, unsigned long long, unsigned long long)>("fake_nvml_set");
    count_ = library->function<void(unsigned long long (*)())>("fake_nvml_count");
    set_own_ = library->function<void(unsigned long long, unsigned long long)>("fake_nvml_set_own");
    if (set_ == nullptr) GTEST_SKIP() << "this machine has a management library of its own";
  }
  void TearDown() override {
    if (set_ != nullptr) set_(false, 0, 0);
    ::unsetenv("TANDEM_CUDA_LIBS");
  }
  void (*set_)(bool, unsigned long long, unsigned long long) = nullptr;
  void (*count_)(unsigned long long (*)()) = nullptr;
  void (*set_own_)(unsigned long long, unsigned long long) = nullptr;
};

TEST_F(FakeNvml, NamesOthersWhoHoldMemory) {
  set_(true, 0, 0);
  set_own_(1_GiB, 1_GiB);
  const auto nvml = Nvml::open(bus);
  ASSERT_TRUE(nvml);
  EXPECT_EQ(nvml->other_holders(), "process 4242 (python3) holds 10.00 GiB") << "this process is no other";
  EXPECT_FALSE(Nvml::open("0000:01:00.0")) << "a device that it does not know";
  set_(false, 0, 0);
  EXPECT_FALSE(Nvml::open(bus));
}

TEST_F(FakeNvml, MeasuresWhatContextAndLibrariesTake) {
  // 100 MiB were in use before the context, 300 MiB are once the libraries are loaded, as CUDA counts. What the driver
  // keeps for itself is part of NVML's count alone.
  constexpr std::size_t kept = 550_MiB;
  set_(true, kept + 100_MiB, kept + 300_MiB);
  const fake_cuda::Card card{.memory = 2_GiB, .taken = 300_MiB};
  constexpr int of_this_test = 12;  // others open the first cards, and what is measured holds for a process
  fake_cuda::install({.cards = std::vector<fake_cuda::Card>(13, card)});
  for (int opened = 0; opened < 3; ++opened) {
    const auto device = open_fake_device({.capacity = 64_MiB, .ordinal = of_this_test});
    EXPECT_EQ(device->info().reserved, 200_MiB + 128_MiB) << opened << " were opened before";
    EXPECT_EQ(device->info().capacity, 64_MiB);
  }
}

/// The ceiling that a refusal of one of `bytes` advises.
std::size_t advised_instead_of(std::size_t bytes, int ordinal) {
  CudaDeviceOptions options = cuda_options({.ordinal = ordinal});
  options.memory = bytes;
  try {
    CudaDevice device(std::move(options));
  } catch (const PlanError& error) {
    const std::string text = error.what(), flag = "or use --device-memory ";
    return std::stoull(text.substr(text.find(flag) + flag.size())) * 1_MiB;
  }
  return 0;
}

TEST_F(FakeNvml, ACeilingAsARefusalAdvisesItLeavesRoomForWhatIsLoadedLater) {
  constexpr int assumed = 11, measured = 3;
  for (const int ordinal : {assumed, measured}) {
    SCOPED_TRACE(ordinal);
    set_(ordinal == measured, 100_MiB, 300_MiB);
    const fake_cuda::Card card{.memory = 2_GiB, .taken = 700_MiB, .code = 128_MiB};
    fake_cuda::install({.cards = std::vector<fake_cuda::Card>(12, card)});
    CudaDeviceOptions options = cuda_options({.ordinal = ordinal});
    options.memory = advised_instead_of(2_GiB, ordinal);
    EXPECT_EQ(options.memory, 2_GiB - 700_MiB + (ordinal == measured ? 200_MiB : 512_MiB));
    CudaDevice device(std::move(options));
    const MemoryBlock all = device.allocate(device.info().capacity, "all");
    const Stream stream = device.make_stream("a");
    const TensorView view{all.data(), DType::f32, {256}};
    EXPECT_NO_THROW(device.ops().add(view, view, view, stream));
    device.synchronize(stream);
  }
}

TEST_F(FakeNvml, WhatIsAssumedWithoutItHoldsForAProcess) {
  constexpr int of_this_test = 7;
  const fake_cuda::Card card{.memory = 2_GiB, .taken = 100_MiB};
  fake_cuda::install({.cards = std::vector<fake_cuda::Card>(8, card)});
  const auto first = open_fake_device({.capacity = 512_MiB, .ordinal = of_this_test});
  EXPECT_EQ(first->info().reserved, 132_MiB) << "no more than is in use, rounded";
  const MemoryBlock block = first->allocate(512_MiB, "weights");
  EXPECT_EQ(open_fake_device({.capacity = 64_MiB, .ordinal = of_this_test})->info().reserved, 132_MiB)
      << "the memory that is in use now is a run's";
}

TEST_F(FakeNvml, CountsBeforeThereIsAContextOnAnyCard) {
  constexpr int of_this_test = 13;
  count_([]() -> unsigned long long { return fake_cuda::contexts().empty() ? 550_MiB : 850_MiB; });
  const fake_cuda::Card card{.memory = 2_GiB};
  fake_cuda::install({.cards = std::vector<fake_cuda::Card>(14, card)});
  EXPECT_EQ(open_fake_device({.capacity = 64_MiB, .ordinal = of_this_test})->info().reserved, 300_MiB + 128_MiB);
}

TEST_F(FakeNvml, LeavesOutWhatOthersTakeOrGiveBackMeanwhile) {
  // 250 MiB go to this process while its libraries are loaded; the driver may keep up to 64 MiB more for it.
  struct Case {
    std::size_t all_before, all_after, counted;
  };
  const fake_cuda::Card card{.memory = 2_GiB, .taken = 1_GiB};
  const std::vector<fake_cuda::Card> cards(7, card);
  int ordinal = 4;  // others open the first cards, and what is measured holds for a process
  for (const Case& c :
       {Case{500_MiB, 760_MiB, 260_MiB}, Case{500_MiB, 1150_MiB, 314_MiB}, Case{500_MiB, 400_MiB, 250_MiB}}) {
    set_(true, c.all_before, c.all_after);
    set_own_(0, 250_MiB);
    fake_cuda::install({.cards = cards});
    EXPECT_EQ(open_fake_device({.capacity = 64_MiB, .ordinal = ordinal++})->info().reserved, c.counted + 128_MiB);
  }
}

/// Reserved bytes of a card that no other test opens, since an assumption about a card holds for the whole process.
std::size_t reserved_of_card(int ordinal) {
  const fake_cuda::Card card{.memory = 2_GiB, .taken = 700_MiB};
  fake_cuda::install({.cards = std::vector<fake_cuda::Card>(static_cast<std::size_t>(ordinal) + 1, card)});
  return open_fake_device({.capacity = 64_MiB, .ordinal = ordinal})->info().reserved;
}

TEST_F(FakeNvml, AssumesWhatTheyTakeWhereWhatGrewIsOfOthers) {
  // The context was there before; what is loaded into it is less than what others take meanwhile.
  set_(true, 700_MiB, 1_GiB);
  set_own_(600_MiB, 620_MiB);
  EXPECT_EQ(reserved_of_card(8), 640_MiB);
}

TEST_F(FakeNvml, AssumesWhatTheyTakeWhereTheContextWasThereBefore) {
  // The libraries are loaded into a context of the program that tandem is a part of.
  set_(true, 700_MiB, 720_MiB);
  EXPECT_EQ(reserved_of_card(9), 640_MiB);
}

TEST_F(FakeNvml, AssumesWhatTheyTakeWhereOthersGaveMemoryBackMeanwhile) {
  set_(true, 900_MiB, 700_MiB);
  EXPECT_EQ(reserved_of_card(10), 640_MiB);
}

TEST_F(FakeNvml, RefusalsSayWhoHoldsTheMemory) {
  set_(true, 6_GiB, 6_GiB);
  constexpr int of_this_test = 15;
  const fake_cuda::Card card{.memory = 8_GiB, .taken = 6_GiB};
  fake_cuda::install({.cards = std::vector<fake_cuda::Card>(16, card)});
  CudaDeviceOptions options = cuda_options({.ordinal = of_this_test});
  options.memory = 4_GiB;
  try {
    CudaDevice device(std::move(options));
    FAIL();
  } catch (const PlanError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("--device-memory 4.00 GiB was asked for"),
                                    HasSubstr("are free: process 4242 (python3) holds 10.00 GiB")));
  }
  const auto device = open_fake_device({.capacity = 100_MiB, .ordinal = of_this_test});
  fake_cuda::fail_call("cudaMalloc", 0, cudaErrorMemoryAllocation);
  try {
    (void)device->allocate(1_MiB, "activations");
    FAIL();
  } catch (const PlanError& error) {
    EXPECT_THAT(error.what(), HasSubstr("this run holds: nothing; process 4242 (python3) holds 10.00 GiB"));
  }
}

}  // namespace
}  // namespace tandem
