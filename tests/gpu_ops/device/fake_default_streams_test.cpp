// Default streams of the fake runtime are as CUDA documents them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "gpu_ops/emulation/grid.hpp"
#include "tests/gpu_ops/fake_runtime/fake_cuda.hpp"

namespace tandem {
namespace {

class DefaultStreams : public ::testing::Test {
 protected:
  void SetUp() override {
    fake_cuda::install({.seed = 3, .longest_delay_us = 50});
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
    ASSERT_EQ(cudaStreamCreateWithPriority(&blocking_, cudaStreamDefault, 0), cudaSuccess);
    ASSERT_EQ(cudaStreamCreateWithPriority(&apart_, cudaStreamNonBlocking, 0), cudaSuccess);
  }
  void TearDown() override {
    cudaStreamDestroy(blocking_);
    cudaStreamDestroy(apart_);
    EXPECT_EQ(fake_cuda::census(), fake_cuda::Census());
    fake_cuda::install({});
  }

  /// Work that notes its name, once the gate is open.
  void queue_held(cudaStream_t stream, char name) {
    emulation::enqueue("held", stream, [this, name] {
      while (!open_) std::this_thread::sleep_for(std::chrono::microseconds(50));
      note(name);
    });
  }
  void queue(cudaStream_t stream, char name) {
    emulation::enqueue("noted", stream, [this, name] { note(name); });
  }
  void queue_opening(cudaStream_t stream, char name) {
    emulation::enqueue("opening", stream, [this, name] {
      note(name);
      std::this_thread::sleep_for(std::chrono::milliseconds(5));  // for whoever does not wait
      open_ = true;
    });
  }
  std::string order() {
    for (const cudaStream_t stream : {blocking_, apart_, cudaStream_t{nullptr}, cudaStreamPerThread}) {
      EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    }
    const std::lock_guard lock(mutex_);
    open_ = false;
    return std::exchange(seen_, {});
  }
  void note(char name) {
    const std::lock_guard lock(mutex_);
    seen_ += name;
  }

  cudaStream_t blocking_ = nullptr;
  cudaStream_t apart_ = nullptr;
  std::atomic<bool> open_{false};

 private:
  std::mutex mutex_;
  std::string seen_;
};

TEST_F(DefaultStreams, TheLegacyOneWaitsForBlockingStreams) {
  for (const cudaStream_t handle : {cudaStream_t{nullptr}, cudaStreamLegacy}) {
    queue_held(blocking_, 'b');
    queue(handle, 'l');
    queue_opening(apart_, 'n');
    EXPECT_EQ(order(), "nbl");
  }
}

TEST_F(DefaultStreams, BlockingStreamsWaitForTheLegacyOne) {
  queue_held(nullptr, 'l');
  queue(blocking_, 'b');
  queue_opening(apart_, 'n');
  EXPECT_EQ(order(), "nlb");
}

TEST_F(DefaultStreams, EachThreadHasItsOwnWhichBlocks) {
  queue_held(cudaStreamPerThread, 'p');
  std::thread([&] {
    queue(cudaStreamPerThread, 'q');
    EXPECT_EQ(cudaStreamSynchronize(cudaStreamPerThread), cudaSuccess);
  }).join();
  queue(nullptr, 'l');
  queue_opening(apart_, 'n');
  EXPECT_EQ(order(), "qnpl");
}

}  // namespace
}  // namespace tandem
