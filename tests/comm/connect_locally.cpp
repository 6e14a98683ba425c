// Groups of ranks that are threads of one process and copy from each other's memory.
#include "comm/local_group.hpp"
#include "tests/comm/group_testing.hpp"

namespace tandem::testing {

std::vector<std::unique_ptr<Group>> connect(std::span<Device* const> devices, double watchdog_seconds) {
  return make_local_group(devices, watchdog_seconds);
}

}  // namespace tandem::testing
