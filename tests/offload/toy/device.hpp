#pragma once
// Device of the toy trainer. The tests of the engine are one text: which device they run on is decided by the file that
// defines make_toy_device() in the program they are linked into.
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "core/device/device.hpp"
#include "core/tensor/tensor.hpp"
#include "cpu_ops/device/host_device.hpp"

namespace tandem::testing {

/// Work of the toy's: reads `weights` and fills `gradients`, of the views' types; null where there are none.
using ToyWork = std::function<void(const bf16* weights, void* gradients)>;

class ToyDevice {
 public:
  virtual ~ToyDevice() = default;
  virtual Device& device() = 0;
  /// Runs `work` on the device memory of the two views as part of `stream`. May block.
  virtual void enqueue(StreamView stream, std::string_view name, TensorView weights, TensorView gradients,
                       ToyWork work) = 0;
};

/// `options` are those of the host device; another device takes from them what it has: the capacity, threads
/// of the update, faults.
using MakeToyDevice = std::unique_ptr<ToyDevice> (*)(const HostDeviceOptions& options);
std::unique_ptr<ToyDevice> make_toy_device(const HostDeviceOptions& options);
/// One for each of these, that can copy from each other.
std::vector<std::unique_ptr<ToyDevice>> make_toy_devices(std::span<const HostDeviceOptions> options);
std::unique_ptr<ToyDevice> make_toy_host_device(const HostDeviceOptions& options);

/// Part of the message with which a fault that throws "injected failure" reaches whoever waits.
std::string_view injected_failure();
/// Whether the device takes HostDeviceOptions::faults.
bool takes_faults();
/// Whether `before_task` of these is called for that device's tasks alone.
bool has_faults_of_its_own();
/// Whether its link is as slow as HostDeviceOptions::link_bytes_per_second says.
bool emulates_link();

}  // namespace tandem::testing
