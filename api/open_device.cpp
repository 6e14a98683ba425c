#include "api/open_device.hpp"

#include <fmt/format.h>

#include <charconv>
#include <system_error>

#include "api/cuda_backend.hpp"
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
  host.numa_node = options.numa_node;
  host.link_bytes_per_second = options.link_bytes_per_second;
  host.update_parameters_per_second = options.update_parameters_per_second;
  host.pageable = pageable_notice(options);
  return std::make_unique<HostDevice>(std::move(host));
}

constexpr int first_gpu = -1;

int ordinal_of(std::string_view name) {
  constexpr std::string_view prefix = "cuda";
  if (name == prefix) return first_gpu;
  if (name.starts_with("cuda:")) {
    const std::string_view digits = name.substr(prefix.size() + 1);
    int ordinal = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), ordinal);
    if (error == std::errc() && end == digits.data() + digits.size() && ordinal >= 0) return ordinal;
  }
  throw UsageError(fmt::format("device '{}' is not known", name), {}, "use auto, host, cuda or cuda:N");
}

}  // namespace

Notice pageable_notice(const DeviceOptions& options) {
  if (options.strict) return {};
  return [warning = options.warning](const std::string& why) {
    if (warning) warning(why + ": it stays pageable, and copies to and from it are slower");
  };
}

void require_device_name(std::string_view name) {
  if (name != "host" && name != "cpu" && name != "auto") static_cast<void>(ordinal_of(name));
}

std::unique_ptr<Device> open_device(std::string_view name, const DeviceOptions& options) {
  if (name == "host" || name == "cpu") return open_host(options);
  if (name == "auto") {
    const std::string why = why_no_cuda();
    if (why.empty()) return open_cuda(first_gpu, options);
    if (options.notice) options.notice(why);
    return open_host(options);
  }
  const int ordinal = ordinal_of(name);
  if (const std::string why = why_no_cuda(); !why.empty()) {
    throw DeviceError(fmt::format("device '{}'", name), why, "use --device host");
  }
  return open_cuda(ordinal, options);
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
