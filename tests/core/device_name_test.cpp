// Names of devices as users write them.
#include "core/device/device_name.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/base/error.hpp"

namespace tandem {
namespace {

using Kind = DeviceName::Kind;

TEST(DeviceNames, AreKindAndNumber) {
  const auto expect = [](const char* text, Kind kind, int ordinal) {
    const DeviceName name = parse_device_name(text);
    EXPECT_EQ(name.kind, kind) << text;
    EXPECT_EQ(name.ordinal, ordinal) << text;
  };
  expect("auto", Kind::automatic, -1);
  expect("host", Kind::host, -1);
  expect("cpu", Kind::host, -1);
  expect("cuda", Kind::cuda, -1);
  expect("cuda:0", Kind::cuda, 0);
  expect("cuda:12", Kind::cuda, 12);
}

TEST(DeviceNames, OthersAreUsageErrors) {
  for (const char* text :
       {"", "gpu", "Host", "host:0", "auto ", "cuda:", "cuda:x", "cuda:-1", "cuda:1x", "cuda: 1", "cuda:99999999999"}) {
    try {
      static_cast<void>(parse_device_name(text));
      ADD_FAILURE() << text;
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find("'" + std::string(text) + "'"), std::string::npos) << error.what();
    }
  }
}

TEST(DeviceNames, SeveralAreOfOneKindWithCommasBetween) {
  using Names = std::vector<std::string>;
  for (const char* one : {"auto", "host", "cpu", "cuda", "cuda:3"}) EXPECT_EQ(split_device_names(one), Names{one});
  EXPECT_EQ(split_device_names("host,host"), (Names{"host", "host"}));
  EXPECT_EQ(split_device_names("host,cpu,host"), (Names{"host", "cpu", "host"}));
  EXPECT_EQ(split_device_names("cuda:0,cuda:1"), (Names{"cuda:0", "cuda:1"}));
  EXPECT_EQ(split_device_names("cuda:7,cuda:0,cuda:12"), (Names{"cuda:7", "cuda:0", "cuda:12"}));
}

TEST(DeviceNames, ListsThatLeaveADeviceOpenOrMixKindsAreUsageErrors) {
  for (const char* text : {"host,cuda:0", "cuda:0,host", "cuda:0,cuda:1,host", "auto,auto", "host,auto", "auto,host",
                           "cuda:0,auto", "cuda:1,cuda:1", "cuda,cuda", "cuda,cuda:1", "cuda:0,cuda"}) {
    try {
      static_cast<void>(split_device_names(text));
      ADD_FAILURE() << text;
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find("'" + std::string(text) + "'"), std::string::npos) << error.what();
    }
  }
  for (const char* text :
       {"", ",", "host,", ",host", "host,,host", "host, host", "host;host", "cuda:0,1", "cuda:0,gpu"}) {
    EXPECT_THROW(static_cast<void>(split_device_names(text)), UsageError) << text;
  }
}

TEST(DeviceNames, OneIsRequiredWhereSeveralAreNotTaken) {
  for (const char* text : {"auto", "host", "cuda", "cuda:1"})
    EXPECT_NO_THROW(require_one_device(text, "bench")) << text;
  for (const char* text : {"host,host", "cuda:0,cuda:1"}) {
    try {
      require_one_device(text, "bench");
      ADD_FAILURE() << text;
    } catch (const UsageError& error) {
      EXPECT_EQ(error.what(), "devices '" + std::string(text) + "': bench takes one; name one of them");
    }
  }
  EXPECT_THROW(require_one_device("host,", "bench"), UsageError);
}

}  // namespace
}  // namespace tandem
