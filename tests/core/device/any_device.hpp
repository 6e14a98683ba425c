#pragma once
// Cases that test what every device promises, compiled into the tests of each kind: the program is linked with a file
// that opens its device.
#include <cstddef>
#include <memory>
#include <vector>

#include "core/device/device.hpp"

namespace tandem::testing {

/// Null where this machine has none: the test is to be skipped. `capacity`: bytes of what may be allocated.
std::unique_ptr<Device> open_any_device(std::size_t capacity = std::size_t{8} << 20);

/// Several of one kind, on cards of their own where there are so many. None where this machine has none.
std::vector<std::unique_ptr<Device>> open_any_devices(int count, std::size_t capacity = std::size_t{8} << 20);

}  // namespace tandem::testing

/// A device, or the test ends here as skipped.
#define TANDEM_ANY_DEVICE_OR_SKIP(name, ...)                               \
  const auto name##_owner = tandem::testing::open_any_device(__VA_ARGS__); \
  if (!name##_owner) GTEST_SKIP() << "this machine has none";              \
  tandem::Device& name = *name##_owner

/// Opens two devices of one kind, or skips the test.
#define TANDEM_ANY_PEERS_OR_SKIP(device, peer)                          \
  const auto device##_owners = tandem::testing::open_any_devices(2);    \
  if (device##_owners.empty()) GTEST_SKIP() << "this machine has none"; \
  tandem::Device& device = *device##_owners[0];                         \
  tandem::Device& peer = *device##_owners[1]
