#pragma once
// What every device promises is tested by the same cases, compiled into the tests of each: the program is linked with a
// file that opens its device.
#include <cstddef>
#include <memory>

#include "core/device.hpp"

namespace tandem::testing {

/// Null where this machine has none: the test is to be skipped. `capacity`: bytes of what may be allocated.
std::unique_ptr<Device> open_any_device(std::size_t capacity = std::size_t{8} << 20);

}  // namespace tandem::testing

/// A device, or the test ends here as skipped.
#define TANDEM_ANY_DEVICE_OR_SKIP(name, ...)                               \
  const auto name##_owner = tandem::testing::open_any_device(__VA_ARGS__); \
  if (!name##_owner) GTEST_SKIP() << "this machine has none";              \
  tandem::Device& name = *name##_owner
