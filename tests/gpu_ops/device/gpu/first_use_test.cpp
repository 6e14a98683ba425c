// First use of the device by the main of the suites for a GPU, before their tests; seen on the fake.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>
#include <set>
#include <string>

#include "tests/gpu_ops/fake_runtime/fake_cuda.hpp"

namespace tandem {
namespace {

class Seen {
 public:
  Seen() {
    fake_cuda::set_before_work([this](std::string_view, std::string_view work) {
      const std::lock_guard lock(mutex_);
      works_.emplace(work);
    });
  }
  std::set<std::string> works() {
    const std::lock_guard lock(mutex_);
    return works_;
  }

 private:
  std::mutex mutex_;
  std::set<std::string> works_;
};

Seen seen;

TEST(FirstUse, OfADeviceIsBeforeTheTests) {
  EXPECT_THAT(seen.works(), ::testing::IsSupersetOf({"kernel", "fill zero", "copy to device", "copy to host",
                                                     "copy on device", "record", "wait"}));
}

}  // namespace
}  // namespace tandem
