#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <random>
#include <string_view>
#include <thread>

#include "cpu_ops/device/host_device.hpp"
#include "tests/comm/group_testing.hpp"

namespace tandem::testing {

// Half of the tasks start at once: order shows where some streams run ahead while others lag.
std::vector<std::unique_ptr<Device>> open_group_devices(int ranks, std::uint64_t seed) {
  std::vector<std::unique_ptr<Device>> devices;
  for (int rank = 0; rank < ranks; ++rank) {
    HostDeviceOptions options{.capacity = std::size_t{8} << 20, .threads = 1, .update_threads = 1};
    options.faults = std::make_shared<HostFaults>();
    const auto random = std::make_shared<std::mt19937_64>(seed * 100 + static_cast<std::uint64_t>(rank));
    const auto mutex = std::make_shared<std::mutex>();
    options.faults->before_task = [random, mutex](std::string_view, std::string_view) {
      std::uint64_t drawn = 0;
      {
        const std::lock_guard lock(*mutex);
        drawn = (*random)();
      }
      if (drawn % 2 == 0) std::this_thread::sleep_for(std::chrono::microseconds(drawn / 2 % 200));
    };
    devices.push_back(std::make_unique<HostDevice>(options));
  }
  return devices;
}

std::vector<std::string> complaints_of_devices() { return {}; }

}  // namespace tandem::testing
