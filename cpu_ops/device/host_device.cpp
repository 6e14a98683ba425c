#include "cpu_ops/device/host_device.hpp"

#include <fmt/format.h>
#include <oneapi/dnnl/dnnl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "core/base/error.hpp"
#include "core/host/isa.hpp"
#include "core/host/large_copy.hpp"
#include "core/host/mapped_memory.hpp"
#include "core/host/numa_node.hpp"
#include "core/host/topology.hpp"
#include "cpu_ops/device/host_device_memory.hpp"
#include "cpu_ops/device/host_event.hpp"
#include "cpu_ops/device/host_ops.hpp"
#include "cpu_ops/device/host_stream.hpp"
#include "cpu_ops/device/pacer.hpp"
#include "cpu_ops/device/wrapped_kernels.hpp"
#include "cpu_ops/threads/parallel.hpp"
#include "cpu_ops/update/update_kernels.hpp"

namespace tandem {
namespace {

std::size_t capacity_of(const HostDeviceOptions& options, const Topology& topology) {
  if (options.capacity > 0) return options.capacity;
  using namespace literals;
  // Left to the rest of the process and of the machine.
  const std::size_t available = topology.available_memory_bytes;
  const std::size_t margin = std::max(256_MiB, available / 10);
  if (available <= margin) {
    throw DeviceError("no capacity for the host device", "what memory is available is unknown, or too little",
                      "give --device-memory");
  }
  return (available - margin) / arena_alignment * arena_alignment;
}

std::string compute_key(const Topology& topology, int threads) {
  const dnnl_version_t* library = dnnl_version();
  // oneDNN chooses its own instructions: fewer where DNNL_MAX_CPU_ISA or a virtual machine keeps some from it.
  return fmt::format("host cpu={} isa={} threads={} oneDNN={}.{}.{} isa={:#x}",
                     topology.cpu_model.empty() ? "unknown" : topology.cpu_model, name_of(best_isa()), threads,
                     library->major, library->minor, library->patch,
                     static_cast<unsigned>(dnnl_get_effective_cpu_isa()));
}

HostEvent& own(EventView event) {
  HostEvent* host = dynamic_cast<HostEvent*>(event.impl());
  if (host == nullptr) throw MisuseError("event given to the host device is empty or of another device");
  return *host;
}

HostDevice& own_kind(Device& peer) {
  HostDevice* host = dynamic_cast<HostDevice*>(&peer);
  if (host == nullptr) throw MisuseError("the peer given to a host device is a device of another kind");
  return *host;
}

void require_copyable(const MemoryLedger& own, const MemoryLedger& peer, void* to, const void* from,
                      std::size_t bytes) {
  if (&own == &peer) return own.require_copyable(to, from, bytes, CopyKind::device_to_device);
  peer.require_inside(from, bytes, "copy from a peer reads");
  own.require_inside(to, bytes, "copy from a peer writes");
}

constexpr std::string_view task_of(CopyKind kind) {
  switch (kind) {
    case CopyKind::host_to_device:
      return "copy to device";
    case CopyKind::device_to_host:
      return "copy to host";
    case CopyKind::device_to_device:
      break;
  }
  return "copy on device";
}

}  // namespace

HostDevice::HostDevice(HostDeviceOptions options)
    : node_(options.numa_node < 0 ? nullptr : NumaNode::at(options.numa_node)),
      pin_(options.pin),
      refuse_pinning_(options.faults && options.faults->refuse_pinning),
      pageable_(std::move(options.pageable)),
      pinned_(std::make_shared<std::atomic<std::size_t>>(0)),
      unpinned_(std::make_shared<std::atomic<std::size_t>>(0)),
      to_device_(std::make_shared<Pacer>("the emulated link", options.link_bytes_per_second)),
      to_host_(std::make_shared<Pacer>("the emulated link", options.link_bytes_per_second)) {
  if (options.threads < 0 || options.update_threads < 0) {
    throw UsageError("bad thread count of the host device", "it must not be negative", "0 uses every CPU");
  }
  const Topology topology = read_topology();
  const std::shared_ptr<Parallel> device_parallel = make_parallel(options.threads);
  const std::shared_ptr<Parallel> host_parallel = make_parallel(options.update_threads, node_);

  info_.kind = "host";
  info_.name = "host";
  info_.capacity = capacity_of(options, topology);
  info_.threads = device_parallel->threads();
  info_.compute_key = compute_key(topology, info_.threads);
  memory_ = std::make_shared<HostDeviceMemory>(info_.capacity, options.poison_memory, std::move(options.allocator));
  if (options.faults) {
    // Shares ownership of the faults, so that they live as long as any stream.
    hook_ = std::shared_ptr<const TaskHook>(options.faults, &options.faults->before_task);
  }
  device_kernels_ = make_host_update_kernels(device_parallel);
  host_kernels_ = make_host_update_kernels(host_parallel);
  if (options.update_parameters_per_second > 0.0) {
    const auto pacer = std::make_shared<Pacer>("the emulated CPU update", options.update_parameters_per_second);
    host_kernels_ = make_wrapped_kernels(std::move(host_kernels_), [pacer](std::int64_t count, const auto& work) {
      pacer->run(static_cast<double>(count), work);
    });
  }
  if (options.faults && options.faults->before_update) {
    host_kernels_ = make_wrapped_kernels(std::move(host_kernels_), [faults = options.faults](auto, const auto& work) {
      faults->before_update();
      work();
    });
  }
  ops_ = std::make_unique<HostOps>(device_parallel, *device_kernels_,
                                   [this](StreamView stream, std::string_view name, std::function<void()> work) {
                                     enqueue(stream, name, std::move(work));
                                   });
}

HostDevice::~HostDevice() = default;

Stream HostDevice::make_stream(std::string_view name, StreamPriority) {
  return Stream(std::make_unique<HostStream>(name, this, hook_));
}

Stream HostDevice::wrap_stream(void*) {
  throw MisuseError("the host device has no native streams to wrap", "they exist on GPUs only", "use make_stream");
}

Event HostDevice::make_event() { return Event(std::make_unique<HostEvent>()); }

MemoryBlock HostDevice::allocate(std::size_t bytes, std::string_view name) { return memory_->allocate(bytes, name); }

MemoryBlock HostDevice::allocate_pinned(std::size_t bytes, std::string_view name) {
  if (bytes == 0) return {};
  const std::string what = fmt::format("cannot pin {} for '{}'", format_bytes(bytes), name);
  const auto unpinned = std::make_shared<std::size_t>(0);  // bytes of this block
  MemoryBlock block;
  try {
    void* const data = MappedMemory::provide(bytes, node_.get(), host_kernels_->parallel());
    *pinned_ += bytes;
    block = MemoryBlock(data, bytes, [all = pinned_, all_unpinned = unpinned_, unpinned](void* p, std::size_t n) {
      MappedMemory::unmap(p, n);
      *all -= n;
      *all_unpinned -= *unpinned;
    });
  } catch (const std::bad_alloc&) {
    throw DeviceError(what, "the system refuses the memory", "lower --host-memory");
  }
  if (pin_ && (refuse_pinning_ || ::mlock(block.data(), bytes) != 0)) {
    const DeviceError refusal(what, "the system refuses to lock it", "raise the limit of locked memory (ulimit -l)");
    if (!pageable_) throw refusal;
    pageable_(refusal.what());
    *unpinned = bytes;
    *unpinned_ += bytes;
  }
  return block;
}

std::size_t HostDevice::allocated_bytes() const noexcept { return memory_->ledger().allocated(); }
std::size_t HostDevice::peak_bytes() const noexcept { return memory_->ledger().peak(); }
std::size_t HostDevice::pinned_bytes() const noexcept { return *pinned_; }

void HostDevice::copy(void* to, const void* from, std::size_t bytes, CopyKind kind, StreamView stream) {
  HostStream& queue = own(stream);
  if (bytes == 0) return;
  memory_->ledger().require_copyable(to, from, bytes, kind);
  queue.enqueue(task_of(kind), [=, this] { move(to, from, bytes, kind); });
}

void HostDevice::move(void* to, const void* from, std::size_t bytes, CopyKind kind) {
  memory_->ledger().require_copyable(to, from, bytes, kind);
  const auto move_bytes = [&] { large_copy(to, from, bytes, host_kernels_->parallel()); };
  switch (kind) {
    case CopyKind::host_to_device:
      return to_device_->run(static_cast<double>(bytes), move_bytes);
    case CopyKind::device_to_host:
      return to_host_->run(static_cast<double>(bytes), move_bytes);
    case CopyKind::device_to_device:
      return move_bytes();
  }
}

void HostDevice::copy_from(Device& peer, void* to, const void* from, std::size_t bytes, StreamView stream) {
  const HostDevice& source = own_kind(peer);
  HostStream& queue = own(stream);
  if (bytes == 0) return;
  require_copyable(memory_->ledger(), source.memory_->ledger(), to, from, bytes);
  // Shares the peer's book-keeping and link: nothing says that the peer outlives streams of this device.
  queue.enqueue("copy from peer", [=, this, memory = source.memory_, from_peer = source.to_host_] {
    require_copyable(memory_->ledger(), memory->ledger(), to, from, bytes);
    if (memory == memory_) return large_copy(to, from, bytes);
    // Up the peer's link and down this one, both at once: devices have no way of their own to each other.
    const auto amount = static_cast<double>(bytes);
    from_peer->run(amount, [&] { to_device_->run(amount, [&] { large_copy(to, from, bytes); }); });
  });
}

void HostDevice::fill(void* to, unsigned char byte, std::size_t bytes, StreamView stream) {
  HostStream& queue = own(stream);
  if (bytes == 0) return;
  constexpr std::string_view action = "a fill writes";
  memory_->ledger().require_inside(to, bytes, action);
  queue.enqueue("fill", [=, this] {
    memory_->ledger().require_inside(to, bytes, action);
    std::memset(to, byte, bytes);
  });
}

void HostDevice::record(EventView event, StreamView stream) {
  HostEvent& mark = tandem::own(event);
  auto record = std::make_shared<EventRecord>();
  own(stream).enqueue_record(record);
  mark.publish(std::move(record));
}

void HostDevice::wait(StreamView stream, EventView event) {
  HostStream& queue = own(stream);
  if (auto record = tandem::own(event).latest()) queue.enqueue_wait(std::move(record));
}

void HostDevice::wait_for_peer(StreamView stream, Device& peer, EventView event) {
  own_kind(peer);
  wait(stream, event);  // a record knows its stream, whosever that is
}

bool HostDevice::wait_for(EventView event, std::chrono::milliseconds time) {
  const auto record = tandem::own(event).latest();
  return record == nullptr || record->wait_for(time);
}

void HostDevice::call_after(StreamView stream, std::function<void(std::exception_ptr)> then) {
  own(stream).enqueue_call(std::move(then));
}

void HostDevice::synchronize(StreamView stream) { own(stream).synchronize(); }

void HostDevice::enqueue(StreamView stream, std::string_view name, std::function<void()> work) {
  own(stream).enqueue(name, std::move(work));
}

void HostDevice::require_own(StreamView stream) const { own(stream); }

HostStream& HostDevice::own(StreamView stream) const {
  HostStream* host = dynamic_cast<HostStream*>(stream.impl());
  if (host == nullptr) throw MisuseError("stream given to the host device is empty or of another backend");
  if (host->owner() != this) throw MisuseError(fmt::format("stream '{}' belongs to another host device", host->name()));
  return *host;
}

}  // namespace tandem
