#include <utility>

#include "tests/offload/toy/device.hpp"

namespace tandem::testing {
namespace {

class ToyHostDevice final : public ToyDevice {
 public:
  explicit ToyHostDevice(const HostDeviceOptions& options) : device_(options) {}
  Device& device() override { return device_; }
  void enqueue(StreamView stream, std::string_view name, TensorView weights, TensorView gradients,
               ToyWork work) override {
    device_.enqueue(stream, name, [weights, gradients, work = std::move(work)] {
      work(static_cast<const bf16*>(weights.data), gradients.data);
    });
  }

 private:
  HostDevice device_;
};

}  // namespace

std::unique_ptr<ToyDevice> make_toy_host_device(const HostDeviceOptions& options) {
  return std::make_unique<ToyHostDevice>(options);
}

}  // namespace tandem::testing
