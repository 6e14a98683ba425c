#include "gpu_ops/device/cuda_device.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "core/base/error.hpp"
#include "core/device/cuda_memory.hpp"
#include "gpu_ops/device/cuda_device_memory.hpp"
#include "gpu_ops/device/cuda_device_nvml.hpp"
#include "gpu_ops/device/cuda_device_peers.hpp"
#include "gpu_ops/device/cuda_device_ranges.hpp"
#include "gpu_ops/device/cuda_device_reserve.hpp"
#include "gpu_ops/device/cuda_device_stream.hpp"
#include "gpu_ops/device/native_stream.hpp"
#include "gpu_ops/device/runtime.hpp"

namespace tandem {

namespace runtime = gpu::runtime;
using namespace literals;

namespace {

// bf16 in matrix products and asynchronous copies to shared memory begin with this compute capability, and so
// does the code of the kernels. Beyond the last one compiled for, the driver compiles the kernels itself.
constexpr int oldest_major = 8;
constexpr int last_compiled = 90;

std::string version_text(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

std::string why_unusable(const runtime::DeviceFacts& facts) {
  if (facts.major >= oldest_major) return {};
  return fmt::format("{} has compute capability {}.{}, {}.0 or later is needed", facts.name, facts.major, facts.minor,
                     oldest_major);
}

/// Empty where there are devices.
std::string why_no_devices(const runtime::DeviceCount& count) {
  if (count.devices > 0) return {};
  const runtime::Versions versions = runtime::versions();
  if (versions.driver == 0) return "no NVIDIA driver is installed";
  if (count.driver_too_old) {
    return fmt::format("the NVIDIA driver supports CUDA {}, this build needs {}: update the driver",
                       version_text(versions.driver), version_text(versions.runtime));
  }
  if (count.error.empty()) return "the NVIDIA driver finds no GPU";
  return fmt::format("the NVIDIA driver finds no GPU: {}", count.error);
}

runtime::DeviceFacts facts_of_usable(int ordinal) {
  const std::string device = fmt::format("device 'cuda:{}'", ordinal);
  const runtime::DeviceCount count = runtime::count_devices();
  if (const std::string why = why_no_devices(count); !why.empty()) {
    throw DeviceError(device, why, "use --device host");
  }
  if (ordinal < 0 || ordinal >= count.devices) {
    throw DeviceError(device,
                      count.devices == 1
                          ? std::string("there is one GPU, cuda:0")
                          : fmt::format("there are {} GPUs, cuda:0 to cuda:{}", count.devices, count.devices - 1),
                      "use --device cuda");
  }
  const runtime::DeviceFacts facts = runtime::facts_of(ordinal);
  if (const std::string why = why_unusable(facts); !why.empty()) throw DeviceError(device, why, "use --device host");
  return facts;
}

std::string compute_key(const runtime::DeviceFacts& facts, const std::string& ops_key) {
  const runtime::Versions versions = runtime::versions();
  std::string key = fmt::format("cuda gpu={} sm={}{} units={} cudart={}", facts.name, facts.major, facts.minor,
                                facts.multiprocessors, version_text(versions.runtime));
  if (facts.major * 10 + facts.minor > last_compiled) key += " driver=" + version_text(versions.driver);
  return key + " " + ops_key;
}

/// Asked for messages alone, which are few: NVML has a start of its own.
std::string other_holders(const std::string& pci_bus) {
  const std::unique_ptr<Nvml> nvml = Nvml::open(pci_bus);
  return nvml ? nvml->other_holders() : std::string();
}

/// The ceiling of all that the process takes: of what is free, and of the `taken` bytes that it has there already.
std::size_t ceiling_of(const CudaDeviceOptions& options, const runtime::FreeMemory& memory, std::size_t taken,
                       const std::string& pci_bus) {
  const std::size_t available = memory.free + taken;
  if (options.memory == 0) {
    return options.under_windows ? default_cuda_ceiling_under_windows(available) : default_cuda_ceiling(available);
  }
  if (options.memory > available && !options.allocator.allocate) {
    const std::string others = other_holders(pci_bus);
    throw PlanError(
        fmt::format("device memory of cuda:{}", options.ordinal),
        fmt::format("--device-memory {} was asked for, {} of {} are free{}{}", format_bytes(options.memory),
                    format_bytes(available), format_bytes(memory.total), others.empty() ? "" : ": ", others),
        fmt::format("end the other programs, or use --device-memory {}MiB", available / 1_MiB));
  }
  return options.memory;
}

CudaDevice& own_kind(Device& peer) {
  CudaDevice* cuda = dynamic_cast<CudaDevice*>(&peer);
  if (cuda == nullptr) throw MisuseError("the peer given to a CUDA device is a device of another kind");
  return *cuda;
}

}  // namespace

CudaProbe probe_cuda() {
  CudaProbe probe;
  const runtime::DeviceCount count = runtime::count_devices();
  probe.devices = count.devices;
  probe.why_none = why_no_devices(count);
  for (int i = 0; i < count.devices && probe.first_usable < 0; ++i) {
    try {
      const std::string why = why_unusable(runtime::facts_of(i));
      if (why.empty()) {
        probe.first_usable = i;
      } else if (probe.why_none.empty()) {
        probe.why_none = why;
      }
    } catch (const runtime::RuntimeError& error) {
      if (probe.why_none.empty()) probe.why_none = error.what();
    }
  }
  if (probe.first_usable >= 0) probe.why_none.clear();
  return probe;
}

CudaDevice::CudaDevice(CudaDeviceOptions options)
    : ordinal_(options.ordinal),
      ranges_(NvtxRanges::open()),
      peers_(std::make_unique<CudaPeers>(ordinal_, std::move(options.slower_peers))) {
  const runtime::DeviceFacts facts = facts_of_usable(ordinal_);
  const std::shared_ptr<const NumaNode> node =
      options.numa_node < 0 ? NumaNode::of_pci(facts.pci_bus) : NumaNode::at(options.numa_node);
  host_kernels_ = options.make_host_kernels(node);
  // From within what is measured: a device that is made current gets its context.
  std::optional<runtime::CurrentDevice> current;
  std::unique_ptr<Ops> ops;  // goes before `current` where the rest is refused
  const ContextMemory context = make_and_measure_context(ordinal_, facts.pci_bus, [&] {
    runtime::make_context(ordinal_);
    current.emplace(ordinal_);
    ops = options.make_ops();
  });
  const runtime::FreeMemory memory = runtime::free_memory();
  const std::size_t ceiling = ceiling_of(options, memory, context.taken, facts.pci_bus);
  const std::size_t reserve = context.bytes();
  if (ceiling <= reserve) {
    throw PlanError(fmt::format("device memory of cuda:{}", ordinal_),
                    fmt::format("context and libraries alone take {}, the ceiling is {}", format_bytes(reserve),
                                format_bytes(ceiling)),
                    "raise --device-memory");
  }
  info_.kind = "cuda";
  info_.name = fmt::format("cuda:{} {}", ordinal_, facts.name);
  info_.reserved = align_up(reserve);
  info_.capacity = (ceiling - reserve) / arena_alignment * arena_alignment;
  info_.pinned_per_page_table = pinned_per_cuda_page_table;
  info_.cache_bytes = facts.cache_bytes;
  info_.compute_key = compute_key(facts, options.ops_key());
  memory_ = std::make_shared<CudaDeviceMemory>(ordinal_, info_.capacity, std::move(options.allocator),
                                               [bus = facts.pci_bus] { return other_holders(bus); });
  pinned_ = std::make_shared<CudaPinnedMemory>(
      ordinal_, node, options.pinned_piece,
      options.under_windows ? "WSL2 has a limit of its own for pinned memory" : "lower --host-memory",
      std::move(options.pageable));
  ops_ = std::move(ops);
}

CudaDevice::~CudaDevice() {
  std::optional<runtime::CurrentDevice> current;
  try {
    current.emplace(ordinal_);
  } catch (const runtime::RuntimeError&) {  // a lost device: its libraries' handles go all the same
  }
  ops_.reset();
}

Stream CudaDevice::make_stream(std::string_view name, StreamPriority priority) {
  const runtime::CurrentDevice current(ordinal_);
  const std::string text(name);
  return Stream(std::make_unique<CudaStream>(text, ordinal_, this, runtime::make_stream(ordinal_, text, priority)));
}

Stream CudaDevice::wrap_stream(void* native) {
  return Stream(std::make_unique<CudaStream>("wrapped", ordinal_, this, static_cast<CUstream_st*>(native)));
}

Event CudaDevice::make_event() { return Event(std::make_unique<CudaEvent>(ordinal_, this)); }

MemoryBlock CudaDevice::allocate(std::size_t bytes, std::string_view name) { return memory_->allocate(bytes, name); }

MemoryBlock CudaDevice::allocate_pinned(std::size_t bytes, std::string_view name) {
  return pinned_->allocate(bytes, name, host_kernels_->parallel());
}

RangeSink* CudaDevice::ranges() noexcept { return ranges_.get(); }

std::size_t CudaDevice::pageable_bytes() const noexcept { return pinned_->pageable(); }

std::size_t CudaDevice::allocated_bytes() const noexcept { return memory_->ledger().allocated(); }
std::size_t CudaDevice::peak_bytes() const noexcept { return memory_->ledger().peak(); }
std::size_t CudaDevice::pinned_bytes() const noexcept { return pinned_->allocated(); }

void CudaDevice::copy(void* to, const void* from, std::size_t bytes, CopyKind kind, StreamView stream) {
  CudaStream& queue = own(stream);
  if (bytes == 0) return;
  memory_->ledger().require_copyable(to, from, bytes, kind);
  queue.queue([&] {
    for (std::size_t done = 0; done < bytes;) {
      auto* target = static_cast<std::byte*>(to) + done;
      const auto* source = static_cast<const std::byte*>(from) + done;
      std::size_t part = bytes - done;
      if (kind == CopyKind::host_to_device) part = pinned_->in_one_piece(source, part);
      if (kind == CopyKind::device_to_host) part = pinned_->in_one_piece(target, part);
      runtime::copy(target, source, part, kind, queue.native());
      done += part;
    }
  });
}

void CudaDevice::copy_from(Device& peer, void* to, const void* from, std::size_t bytes, StreamView stream) {
  const CudaDevice& source = own_kind(peer);
  CudaStream& queue = own(stream);
  if (bytes == 0) return;
  if (&source == this) return copy(to, from, bytes, CopyKind::device_to_device, stream);
  source.memory_->ledger().require_inside(from, bytes, "copy from a peer reads");
  memory_->ledger().require_inside(to, bytes, "copy from a peer writes");
  queue.queue([&] {
    // To CUDA two devices of one card are one.
    if (source.ordinal_ == ordinal_) return runtime::copy(to, from, bytes, CopyKind::device_to_device, queue.native());
    peers_->reach(source.ordinal_);
    runtime::copy_peer(to, ordinal_, from, source.ordinal_, bytes, queue.native());
  });
}

void CudaDevice::fill(void* to, unsigned char byte, std::size_t bytes, StreamView stream) {
  CudaStream& queue = own(stream);
  if (bytes == 0) return;
  memory_->ledger().require_inside(to, bytes, "a fill writes");
  queue.queue([&] { runtime::fill(to, byte, bytes, queue.native()); });
}

void CudaDevice::record(EventView event, StreamView stream) { own(event).record(own(stream)); }
void CudaDevice::wait(StreamView stream, EventView event) { own(event).hold(own(stream)); }
void CudaDevice::wait_for_peer(StreamView stream, Device& peer, EventView event) {
  own_kind(peer).own(event).hold(own(stream));
}
bool CudaDevice::wait_for(EventView event, std::chrono::milliseconds time) { return own(event).wait_for(time); }

void CudaDevice::call_after(StreamView stream, std::function<void(std::exception_ptr)> then) {
  own(stream).call_after(std::move(then));
}

void CudaDevice::synchronize(StreamView stream) { own(stream).synchronize(); }

void CudaDevice::require_own(StreamView stream) const { own(stream); }

void CudaDevice::require_inside(const void* data, std::size_t bytes, std::string_view action) const {
  memory_->ledger().require_inside(data, bytes, action);
}

CudaStream& CudaDevice::own(StreamView stream) const {
  CudaStream* cuda = dynamic_cast<CudaStream*>(stream.impl());
  if (cuda == nullptr) throw MisuseError("stream given to the CUDA device is empty or of another backend");
  if (cuda->owner() != this) throw MisuseError(fmt::format("stream '{}' belongs to another CUDA device", cuda->name()));
  cuda->require_thread();
  return *cuda;
}

CudaEvent& CudaDevice::own(EventView event) const {
  CudaEvent* cuda = dynamic_cast<CudaEvent*>(event.impl());
  if (cuda == nullptr || cuda->owner() != this) {
    throw MisuseError("event given to the CUDA device is empty or of another device");
  }
  return *cuda;
}

CUstream_st* native_stream(StreamView stream) {
  CudaStream* cuda = dynamic_cast<CudaStream*>(stream.impl());
  if (cuda == nullptr) throw MisuseError("stream given to a CUDA kernel is empty or of another backend");
  cuda->require_thread();
  if (const std::exception_ptr error = cuda->error()) std::rethrow_exception(error);
  runtime::use_device(cuda->ordinal());
  return cuda->native();
}

}  // namespace tandem
