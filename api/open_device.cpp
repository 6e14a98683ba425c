#include "api/open_device.hpp"

#include <fmt/format.h>

#include "core/error.hpp"
#include "core/topology.hpp"
#include "cpu_ops/host_device.hpp"

namespace tandem {
namespace {

std::unique_ptr<Device> open_host(const DeviceOptions& options) {
  HostDeviceOptions host;
  host.capacity = options.memory;
  host.threads = options.threads;
  host.update_threads = options.update_threads;
  host.link_bytes_per_second = options.link_bytes_per_second;
  return std::make_unique<HostDevice>(std::move(host));
}

}  // namespace

std::unique_ptr<Device> open_device(std::string_view name, const DeviceOptions& options) {
  if (name == "auto" || name == "host" || name == "cpu") return open_host(options);
  if (name == "cuda" || name.starts_with("cuda:")) {
    throw DeviceError(fmt::format("device '{}'", name), "this build has no CUDA backend", "use --device host");
  }
  throw UsageError(fmt::format("device '{}' is not known", name), {}, "use auto, host or cuda");
}

PlanningFacts profile_of(const Device& device) {
  PlanningFacts facts;
  facts.device_capacity = device.info().capacity;
  facts.host_available = read_topology().available_memory_bytes;
  return facts;
}

void enqueue_host(Device& device, StreamView stream, std::string_view name, std::function<void()> work) {
  auto* host = dynamic_cast<HostDevice*>(&device);
  if (host == nullptr) throw MisuseError("enqueue_host", "the device is " + device.info().name, "use its own kernels");
  host->enqueue(stream, name, std::move(work));
}

}  // namespace tandem
