// Opening devices by name, as users do, on machines of every kind.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "api/open_device.hpp"
#include "core/base/error.hpp"
#include "tests/gpu_ops/device/fake_device.hpp"
#include "tests/gpu_ops/fake_runtime/fake_cuda.hpp"

namespace tandem {
namespace {

using namespace literals;
using fake_cuda::Card;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;
using ::testing::ThrowsMessage;

DeviceOptions small() { return {.memory = 64_MiB, .threads = 1, .update_threads = 1}; }

struct Opened {
  std::string device;
  std::string notice;
};

Opened open_auto() {
  Opened opened;
  DeviceOptions options = small();
  options.notice = [&](const std::string& why) { opened.notice = why; };
  opened.device = open_device("auto", options)->info().name;
  return opened;
}

auto opening(std::string name, DeviceOptions options = small()) {
  return [=] { (void)open_device(name, options); };
}

TEST(OpenDevice, AutoTakesTheGpuWhereADriverAnswers) {
  fake_cuda::install({});
  const Opened opened = open_auto();
  EXPECT_EQ(opened.device, "cuda:0 Fake GPU");
  EXPECT_EQ(opened.notice, "");
}

TEST(OpenDevice, WithoutADriverAutoTakesTheHostAndSaysWhy) {
  fake_cuda::install({.driver_version = 0});
  const Opened opened = open_auto();
  EXPECT_EQ(opened.device, "host");
  EXPECT_EQ(opened.notice, "no NVIDIA driver is installed");
  EXPECT_THAT(opening("cuda"),
              ThrowsMessage<DeviceError>("device 'cuda': no NVIDIA driver is installed; use --device host"));
}

TEST(OpenDevice, ADriverTooOldIsNamedWithBothVersions) {
  fake_cuda::install({.driver_version = 12020});
  EXPECT_THAT(open_auto().notice, AllOf(HasSubstr("supports CUDA 12.2"), HasSubstr("needs 13.0")));
  EXPECT_THAT(opening("cuda:0"), ThrowsMessage<DeviceError>(HasSubstr("update the driver")));
}

TEST(OpenDevice, ADriverWithoutAGpu) {
  fake_cuda::install({.cards = {}});
  EXPECT_THAT(open_auto().notice, HasSubstr("finds no GPU"));
  EXPECT_THAT(opening("cuda"), ThrowsMessage<DeviceError>(HasSubstr("finds no GPU")));
}

TEST(OpenDevice, ACardThatIsTooOldIsPassedOver) {
  const Card volta{.name = "Old GPU", .major = 7, .minor = 5};
  fake_cuda::install({.cards = {volta}});
  EXPECT_THAT(open_auto().notice, AllOf(HasSubstr("Old GPU has compute capability 7.5"), HasSubstr("8.0 or later")));
  fake_cuda::install({.cards = {volta, Card{}}});
  EXPECT_EQ(open_auto().device, "cuda:1 Fake GPU");
  EXPECT_EQ(open_device("cuda", small())->info().name, "cuda:1 Fake GPU");
  EXPECT_THAT(opening("cuda:0"), ThrowsMessage<DeviceError>(HasSubstr("Old GPU has compute capability 7.5")));
}

TEST(OpenDevice, ANumberThatIsNotThereSaysWhichAre) {
  fake_cuda::install({});
  EXPECT_THAT(opening("cuda:7"),
              ThrowsMessage<DeviceError>("device 'cuda:7': there is one GPU, cuda:0; use --device cuda"));
  fake_cuda::install({.cards = {Card{}, Card{}}});
  EXPECT_THAT(opening("cuda:2"), ThrowsMessage<DeviceError>(HasSubstr("there are 2 GPUs, cuda:0 to cuda:1")));
  EXPECT_EQ(open_device("cuda:1", small())->info().name, "cuda:1 Fake GPU");
}

TEST(OpenDevice, UnknownNamesAreUsageErrors) {
  fake_cuda::install({});
  for (const char* name : {"gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1x", "CUDA", "", "cuda:99999999999"}) {
    EXPECT_THROW(opening(name)(), UsageError) << name;
  }
  EXPECT_EQ(open_device("cpu", small())->info().name, "host");
}

TEST(OpenDevice, WhatOnlyTheHostDeviceEmulatesIsRefusedOnAGpu) {
  DeviceOptions slow_link = small(), slow_update = small();
  slow_link.link_bytes_per_second = 1e9;
  slow_update.update_parameters_per_second = 1e6;
  for (const DeviceOptions& options : {slow_link, slow_update}) {
    fake_cuda::install({});
    for (const char* name : {"cuda", "cuda:0", "auto"}) EXPECT_THROW(opening(name, options)(), UsageError) << name;
    EXPECT_EQ(open_device("host", options)->info().name, "host");
    fake_cuda::install({.driver_version = 0});
    EXPECT_EQ(open_device("auto", options)->info().name, "host");
  }
}

TEST(OpenDevice, TheCeilingIsWhatIsFreeNow) {
  const Card card{.memory = 8_GiB, .taken = 6_GiB};
  fake_cuda::install({.cards = std::vector<Card>(15, card)});
  const char* const name = "cuda:14";  // no other test's, since what is assumed of its context holds for a process
  DeviceOptions options = small();
  options.memory = 3_GiB;
  EXPECT_THAT(opening(name, options),
              ThrowsMessage<PlanError>(AllOf(HasSubstr("--device-memory 3.00 GiB was asked for"),
                                             HasSubstr("of 8.00 GiB are free"), HasSubstr("end the other programs"))));
  options.memory = 0;
  const auto device = open_device(name, options);
  EXPECT_LE(device->info().capacity + device->info().reserved, 8_GiB - 6_GiB + device->info().reserved);
  EXPECT_GT(device->info().capacity, 1_GiB);
}

TEST(OpenDevice, BelowWindowsALargerMarginIsLeft) {
  const auto gain = [](std::size_t memory) {
    fake_cuda::install({.cards = {{.memory = memory}}});
    CudaDeviceOptions options = testing::cuda_options({});
    const std::size_t alone = CudaDevice(options).info().capacity;
    options.under_windows = true;
    return static_cast<double>(alone - CudaDevice(options).info().capacity) / static_cast<double>(1_MiB);
  };
  EXPECT_NEAR(gain(6_GiB), 768 - 0.05 * 6 * 1024, 0.01);
  EXPECT_NEAR(gain(24_GiB), 0.05 * 24 * 1024, 0.01);
}

TEST(OpenDevice, ContextAndLibrariesAreWithinTheCeiling) {
  fake_cuda::install({});
  DeviceOptions options = small();
  const auto device = open_device("cuda", options);
  EXPECT_EQ(device->info().capacity + device->info().reserved, 64_MiB);
  options.memory = 16_MiB;
  EXPECT_THAT(opening("cuda", options),
              ThrowsMessage<PlanError>(AllOf(HasSubstr("context and libraries alone take"), HasSubstr("raise"))));
}

TEST(OpenDevice, PlansAreToldOfPageTables) {
  fake_cuda::install({});
  EXPECT_EQ(profile_of(*open_device("cuda", small())).pinned_per_page_table, 512U);
  EXPECT_EQ(profile_of(*open_device("host", small())).pinned_per_page_table, 0U);
}

TEST(OpenDevice, TheComputeKeyNamesWhatMayChangeABit) {
  fake_cuda::install({});
  const std::string key = open_device("cuda", small())->info().compute_key;
  EXPECT_THAT(key, AllOf(StartsWith("cuda gpu=Fake GPU sm=90 units=8 cudart=13.0"), Not(HasSubstr("driver="))));
  fake_cuda::install({.cards = {Card{.name = "Fake GPU", .major = 10, .minor = 0}}});
  EXPECT_THAT(open_device("cuda", small())->info().compute_key, HasSubstr("driver=13.0"))
      << "its driver compiles the kernels";
}

}  // namespace
}  // namespace tandem
