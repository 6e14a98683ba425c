// The engine's tests on the CUDA device, over a runtime that is a fake: kernels under emulation.
#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "gpu_ops/device/native_stream.hpp"
#include "gpu_ops/emulation/grid.hpp"
#include "tests/gpu_ops/device/fake_device.hpp"
#include "tests/gpu_ops/device/toy_machine.hpp"
#include "tests/offload/toy/device.hpp"

namespace tandem::testing {

fake_cuda::Machine& toy_machine() {
  static fake_cuda::Machine machine{.seed = 7};
  return machine;
}

namespace {

class ToyFakeDevice final : public ToyDevice {
 public:
  /// Opens a device of the machine that is installed.
  ToyFakeDevice(const HostDeviceOptions& options, int ordinal) : device_(open(options, ordinal)) {
    // Kept alive by the hook: work queued last may still be running when the trainer goes.
    if (options.faults) {
      fake_cuda::set_before_work([faults = options.faults](std::string_view stream, std::string_view work) {
        if (faults->before_task) faults->before_task(stream, work);
      });
    }
  }
  ~ToyFakeDevice() override { fake_cuda::set_before_work(nullptr); }
  Device& device() override { return *device_; }
  void enqueue(StreamView stream, std::string_view, TensorView weights, TensorView gradients, ToyWork work) override {
    emulation::enqueue("toy", native_stream(stream), [weights, gradients, work = std::move(work)] {
      work(static_cast<const bf16*>(weights.data), gradients.data);
    });
  }

 private:
  static std::unique_ptr<CudaDevice> open(const HostDeviceOptions& options, int ordinal) {
    FakeDeviceOptions fake{.capacity = options.capacity,
                           .update_threads = options.update_threads,
                           .ordinal = ordinal,
                           .allocator = options.allocator,
                           .pageable = options.pageable};
    if (options.faults) fake.before_update = options.faults->before_update;
    auto device = open_fake_device(fake);
    return device;
  }
  std::unique_ptr<CudaDevice> device_;
};

}  // namespace

std::unique_ptr<ToyDevice> make_toy_device(const HostDeviceOptions& options) {
  return std::move(make_toy_devices(std::span(&options, 1)).front());
}
std::vector<std::unique_ptr<ToyDevice>> make_toy_devices(std::span<const HostDeviceOptions> options) {
  fake_cuda::Machine machine = toy_machine();
  const auto refuses = [](const HostDeviceOptions& o) { return o.faults && o.faults->refuse_pinning; };
  if (std::ranges::any_of(options, refuses)) machine.pinnable = 0;
  const std::size_t cards = machine.cards.size();
  fake_cuda::install(std::move(machine));
  std::vector<std::unique_ptr<ToyDevice>> devices;
  for (const HostDeviceOptions& of_device : options) {
    devices.push_back(std::make_unique<ToyFakeDevice>(of_device, static_cast<int>(devices.size() % cards)));
  }
  return devices;
}
// Whoever comes first says it: a launch, or a wait that names the lost device.
std::string_view injected_failure() { return "unspecified launch failure"; }
bool takes_faults() { return true; }
bool has_faults_of_its_own() { return false; }
bool emulates_link() { return false; }

}  // namespace tandem::testing
