// The engine's tests on the first GPU of this machine. The toy's work is done on the host, between copies.
#include <vector>

#include "tests/gpu_ops/device/device_testing.hpp"
#include "tests/offload/toy/device.hpp"

namespace tandem::testing {
namespace {

class ToyGpu final : public ToyDevice {
 public:
  explicit ToyGpu(std::unique_ptr<CudaDevice> device) : device_(std::move(device)) {}
  Device& device() override { return *device_; }
  void enqueue(StreamView stream, std::string_view, TensorView weights, TensorView gradients, ToyWork work) override {
    std::vector<std::byte> reads(weights.bytes());
    std::vector<std::byte> writes(gradients ? gradients.bytes() : 0);
    device_->copy(reads.data(), weights.data, weights.bytes(), CopyKind::device_to_host, stream);
    if (gradients) device_->copy(writes.data(), gradients.data, gradients.bytes(), CopyKind::device_to_host, stream);
    device_->synchronize(stream);
    work(reinterpret_cast<const bf16*>(reads.data()), writes.empty() ? nullptr : writes.data());
    if (gradients) device_->copy(gradients.data, writes.data(), gradients.bytes(), CopyKind::host_to_device, stream);
    device_->synchronize(stream);
  }

 private:
  std::unique_ptr<CudaDevice> device_;
};

}  // namespace

std::unique_ptr<ToyDevice> make_toy_device(const HostDeviceOptions& options) {
  return std::make_unique<ToyGpu>(open_test_device(options.capacity));
}
std::vector<std::unique_ptr<ToyDevice>> make_toy_devices(std::span<const HostDeviceOptions> options) {
  std::vector<std::unique_ptr<ToyDevice>> devices;
  for (const HostDeviceOptions& of_device : options) devices.push_back(make_toy_device(of_device));
  return devices;
}
std::string_view injected_failure() { return ""; }
bool takes_faults() { return false; }
bool has_faults_of_its_own() { return false; }
bool emulates_link() { return false; }

}  // namespace tandem::testing
