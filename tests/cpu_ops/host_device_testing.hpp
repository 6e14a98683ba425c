#pragma once
// Helpers that the tests of the host device share.
#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <thread>

#include "cpu_ops/device/host_device.hpp"

namespace tandem {

inline HostDeviceOptions small(std::size_t capacity = std::size_t{8} << 20) {
  return {.capacity = capacity, .threads = 1, .update_threads = 1};
}

/// A door that tasks wait at until a test opens it.
class Gate {
 public:
  void open() { open_ = true; }
  std::function<void()> task() {
    return [this] {
      while (!open_) std::this_thread::sleep_for(std::chrono::microseconds(100));
    };
  }

 private:
  std::atomic<bool> open_{false};
};

}  // namespace tandem
