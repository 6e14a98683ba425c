// NCCL by a rank that is alone and sends to itself: on the fake machine, and on a GPU by the real library.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "comm/nccl/communicator.hpp"
#include "core/base/error.hpp"
#include "gpu_ops/device/native_stream.hpp"
#include "tests/comm/group_testing.hpp"
#include "tests/gpu_ops/device/device_testing.hpp"
#include "tests/gpu_ops/nccl/one/nccl_of_one.hpp"

namespace tandem {
namespace {

using namespace literals;

/// A device and NCCL, or a test that is skipped.
class NcclOfOne : public ::testing::Test {
 protected:
  void SetUp() override {
    device_ = testing::open_test_device(32_MiB);
    if (!device_) GTEST_SKIP() << "this machine has no GPU";
    stream_ = device_->make_stream("stream");
    block_ = device_->allocate(2 * largest, "block");
    try {
      nccl_ = &testing::find_nccl();
    } catch (const DeviceError& error) {
      GTEST_SKIP() << error.what();
    }
    communicator_.emplace(*nccl_, 60.0);
  }
  void connect() {
    nccl::UniqueId id{};
    native_stream(stream_);
    ASSERT_EQ(nccl_->get_unique_id(&id), nccl::success);
    communicator_->connect(id, {0, 1});
  }

  static constexpr std::size_t largest = 5000003;
  std::unique_ptr<CudaDevice> device_;
  MemoryBlock block_;
  Stream stream_;
  const nccl::Library* nccl_ = nullptr;
  std::optional<nccl::Communicator> communicator_;
};

TEST_F(NcclOfOne, MovesBytesInTheOrderOfTheStream) {
  ASSERT_NO_FATAL_FAILURE(connect());
  auto* const bytes = static_cast<std::byte*>(block_.data());
  int round = 0;
  for (const std::size_t size : {std::size_t{1}, std::size_t{22}, std::size_t{100003}, largest}) {
    const std::vector<std::byte> values = testing::values_of(0, ++round, size);
    std::vector<std::byte> seen(size);
    device_->copy(bytes, values.data(), size, CopyKind::host_to_device, stream_);
    const std::vector<nccl::Transfer> transfers = {{0, bytes, size, 0, bytes + largest, size}};
    communicator_->exchange(transfers, native_stream(stream_), "itself");
    device_->copy(seen.data(), bytes + largest, size, CopyKind::device_to_host, stream_);
    device_->synchronize(stream_);
    ASSERT_EQ(seen, values) << size;
  }
  EXPECT_EQ(communicator_->failure(), std::nullopt);
  communicator_->finish();
}

TEST_F(NcclOfOne, IsAbortedWhileItIsUsed) {
  ASSERT_NO_FATAL_FAILURE(connect());
  auto* const bytes = static_cast<std::byte*>(block_.data());
  const std::vector<nccl::Transfer> transfers = {{0, bytes, largest, 0, bytes + largest, largest}};
  for (int i = 0; i < 5; ++i) communicator_->exchange(transfers, native_stream(stream_), "itself");
  communicator_->abort();
  EXPECT_NO_THROW(device_->synchronize(stream_));
  EXPECT_THROW(communicator_->exchange(transfers, native_stream(stream_), "itself"), PeerError);
}

}  // namespace
}  // namespace tandem
