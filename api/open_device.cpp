#include "api/open_device.hpp"

#include <fmt/format.h>

#include "api/cuda_backend.hpp"
#include "core/base/error.hpp"
#include "core/device/device_name.hpp"
#include "core/host/topology.hpp"
#include "cpu_ops/device/host_device.hpp"

namespace tandem {
namespace {

std::unique_ptr<Device> open_host(const DeviceOptions& options) {
  HostDeviceOptions host;
  host.capacity = options.memory;
  host.allocator = options.allocator;
  host.threads = options.threads;
  host.update_threads = options.update_threads;
  host.numa_node = options.numa_node;
  host.link_bytes_per_second = options.link_bytes_per_second;
  host.update_parameters_per_second = options.update_parameters_per_second;
  host.pageable = pageable_notice(options);
  return std::make_unique<HostDevice>(std::move(host));
}

/// Throws UsageError: a GPU is as fast as it is.
void refuse_emulation(const DeviceOptions& options) {
  const auto refuse = [](const char* what) {
    throw UsageError(what, "only the host device emulates", "leave it out, or use the device host");
  };
  if (options.link_bytes_per_second > 0) refuse("a link of another bandwidth");
  if (options.update_parameters_per_second > 0) refuse("a CPU update of another rate");
}

}  // namespace

Notice pageable_notice(const DeviceOptions& options) {
  if (options.strict) return {};
  return [warning = options.warning](const std::string& why) {
    if (warning) warning(why + ": it stays pageable, and copies to and from it are slower");
  };
}

std::unique_ptr<Device> open_device(std::string_view text, const DeviceOptions& options) {
  const DeviceName name = parse_device_name(text);
  if (name.kind == DeviceName::Kind::host) return open_host(options);
  const std::string why = why_no_cuda();
  if (why.empty()) {
    refuse_emulation(options);
    return open_cuda(name.ordinal >= 0 ? name.ordinal : options.ordinal, options);
  }
  if (name.kind == DeviceName::Kind::cuda) {
    throw DeviceError(fmt::format("device '{}'", text), why, "use --device host");
  }
  if (options.notice) options.notice(why);
  return open_host(options);
}

PlanningFacts profile_of(const Device& device) { return profile_of(device, read_topology()); }

PlanningFacts profile_of(const Device& device, const Topology& machine) {
  PlanningFacts facts;
  facts.device_capacity = device.info().capacity;
  facts.device_reserved = device.info().reserved;
  facts.pinned_per_page_table = device.info().pinned_per_page_table;
  facts.host_available = machine.available_memory_bytes;
  facts.host_limit = machine.memory_room_bytes;
  facts.device_is_host = device.info().kind == "host";
  return facts;
}

void enqueue_host(Device& device, StreamView stream, std::string_view name, std::function<void()> work) {
  auto* host = dynamic_cast<HostDevice*>(&device);
  if (host == nullptr) throw MisuseError("enqueue_host", "the device is " + device.info().name, "use its own kernels");
  host->enqueue(stream, name, std::move(work));
}

}  // namespace tandem
