#include "core/device_name.hpp"

#include <gtest/gtest.h>

#include <string>

#include "core/error.hpp"

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

}  // namespace
}  // namespace tandem
