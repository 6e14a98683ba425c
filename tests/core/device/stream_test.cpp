// Streams and events of any device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "core/base/error.hpp"
#include "tests/core/device/any_device.hpp"

namespace tandem {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(AnyStream, HasItsName) {
  TANDEM_ANY_DEVICE_OR_SKIP(device);
  const Stream stream = device.make_stream("compute");
  EXPECT_EQ(StreamView(stream).impl()->name(), "compute");
}

TEST(AnyStream, AnEventNeverRecordedIsComplete) {
  TANDEM_ANY_DEVICE_OR_SKIP(device);
  Stream stream = device.make_stream("a");
  Event event = device.make_event();
  EXPECT_TRUE(device.wait_for(event, 0ms));
  device.wait(stream, event);
  device.synchronize(stream);
}

TEST(AnyStream, RefusesWhatIsNotItsOwn) {
  TANDEM_ANY_DEVICE_OR_SKIP(device);
  const auto other = testing::open_any_device();
  Stream stream = device.make_stream("a");
  Stream foreign = other->make_stream("foreign");
  if (device.info().kind == "host") {
    EXPECT_THROW(device.wrap_stream(nullptr), MisuseError);
  }
  EXPECT_THROW(device.synchronize(StreamView()), MisuseError);
  EXPECT_THROW(device.record(EventView(), stream), MisuseError);
  EXPECT_THROW(device.wait(stream, EventView()), MisuseError);
  EXPECT_THROW(device.wait_for(EventView(), 0ms), MisuseError);
  EXPECT_THROW(device.call_after(stream, nullptr), MisuseError);
  EXPECT_THAT([&] { device.synchronize(foreign); }, ThrowsMessage<MisuseError>(HasSubstr("'foreign'")));
  struct Strange : StreamImpl {
    const std::string& name() const noexcept override { return text; }
    std::string text;
  } strange;
  EXPECT_THROW(device.synchronize(StreamView(&strange)), MisuseError);
}

TEST(AnyStream, ManyThreadsMayUseOneStreamAndOneEvent) {
  TANDEM_ANY_DEVICE_OR_SKIP(device);
  Stream stream = device.make_stream("a");
  Stream other = device.make_stream("b");
  Event event = device.make_event();
  const MemoryBlock block = device.allocate(4096, "block");
  std::atomic<int> calls{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 100; ++i) {
        device.fill_zero(block.data(), 4096, stream);
        device.record(event, stream);
        device.wait(i % 2 == 0 ? other : stream, event);
        device.call_after(stream, [&](std::exception_ptr) { ++calls; });
        if (i % 50 == 0) device.synchronize(stream);
        if (i % 60 == 0) {
          EXPECT_TRUE(device.wait_for(event, 60s));
        }
      }
    });
  }
  for (std::thread& t : threads) t.join();
  device.synchronize(other);
  stream = Stream();
  EXPECT_EQ(calls, 400);
}

}  // namespace
}  // namespace tandem
