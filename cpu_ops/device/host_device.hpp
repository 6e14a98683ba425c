#pragma once
// The host device: a complete accelerator made of this machine's CPU. It keeps the contract of
// core/device/device.hpp, so that all that runs on a GPU can be run, tested and used without one.
#include <atomic>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "core/device/device.hpp"
#include "core/device/device_allocator.hpp"

namespace tandem {

class HostDeviceMemory;
class NumaNode;
class Pacer;
class HostStream;
class Parallel;

/// Faults to inject, for tests.
struct HostFaults {
  /// May sleep or throw; called by a stream's worker before each queued task with the names of both
  /// ("record" and "wait" for events). Thread-safe, and set before the first stream is made.
  std::function<void(std::string_view stream, std::string_view task)> before_task;
  std::function<void()> before_update{};  ///< may sleep or throw; called by host_kernels() before each AdamW
  bool refuse_pinning = false;            ///< pinning fails, as under a system limit of locked memory
};

struct HostDeviceOptions {
  std::size_t capacity = 0;                 ///< bytes, hard ceiling; 0: the memory available, less a margin
  int threads = 0;                          ///< threads of the device's kernels; 0: the CPUs of this process
  int update_threads = 0;                   ///< threads of host_kernels(); 0: the CPUs of this process
  double link_bytes_per_second = 0;         ///< emulated bandwidth each way, that of peers too; 0: as copies take
  double update_parameters_per_second = 0;  ///< emulated rate of the CPU update; 0: it takes what it takes
  int numa_node = -1;                       ///< NUMA node of pinned memory and the CPU update's threads; -1: any
  bool poison_memory = false;               ///< fresh device memory is full of NaN
  bool pin = false;                         ///< lock pinned blocks into memory; the host device does not need it
  Notice pageable{};            ///< told where locking is refused and the block stays pageable; empty: an error
  DeviceAllocator allocator{};  ///< source of device memory; none: the system
  std::shared_ptr<HostFaults> faults{};
};

/// Outlives its streams and events; memory blocks may outlive it. Two task arenas: kernels queued on
/// streams run in one, host_kernels() in the other.
class HostDevice final : public Device {
 public:
  /// Throws UsageError on negative options, DeviceError where no capacity is given and none is known.
  explicit HostDevice(HostDeviceOptions options);
  ~HostDevice() override;
  HostDevice(const HostDevice&) = delete;
  HostDevice& operator=(const HostDevice&) = delete;

  const DeviceInfo& info() const noexcept override { return info_; }
  /// Throws DeviceError when no thread can be had for it.
  Stream make_stream(std::string_view name, StreamPriority priority = StreamPriority::usual) override;
  /// Always throws MisuseError.
  Stream wrap_stream(void* native) override;
  void require_own(StreamView stream) const override;
  Event make_event() override;

  /// `bytes` are counted as asked for, without rounding. Zero bytes give an empty block.
  MemoryBlock allocate(std::size_t bytes, std::string_view name) override;
  MemoryBlock allocate_pinned(std::size_t bytes, std::string_view name) override;
  std::size_t pageable_bytes() const noexcept override { return *unpinned_; }
  std::size_t allocated_bytes() const noexcept override;
  std::size_t peak_bytes() const noexcept override;
  /// Bytes of pinned blocks alive.
  std::size_t pinned_bytes() const noexcept;

  /// Throws MisuseError at the call where the device side does not lie in one live allocation, or the
  /// host side does. Checked again when the stream gets there: a buffer freed meanwhile fails the stream.
  void copy(void* to, const void* from, std::size_t bytes, CopyKind kind, StreamView stream) override;
  /// Copies from another host device or this one. Checked like `copy`, on both sides. No emulated link slows it down.
  void copy_from(Device& peer, void* to, const void* from, std::size_t bytes, StreamView stream) override;
  /// Device memory only; checked like `copy`.
  void fill(void* to, unsigned char byte, std::size_t bytes, StreamView stream) override;

  void record(EventView event, StreamView stream) override;
  /// Waits for the record that is the last at the time of this call; recording again later does not
  /// move it. A record always passes, also when its stream is destroyed (its queue is run to the end)
  /// or has failed, and an event never recorded counts as complete, so no wait outlives all work.
  void wait(StreamView stream, EventView event) override;
  void wait_for_peer(StreamView stream, Device& peer, EventView event) override;
  bool wait_for(EventView event, std::chrono::milliseconds time) override;
  /// Calls `then` on the stream's worker, where it holds up that stream alone. Destroying the stream calls it too.
  void call_after(StreamView stream, std::function<void(std::exception_ptr)> then) override;
  /// Throws MisuseError in a task of the stream itself.
  void synchronize(StreamView stream) override;

  /// Queues `work` on `stream`: what kernels are made of. Does not block. What it throws fails the
  /// stream. `name` is copied (39 characters at most).
  void enqueue(StreamView stream, std::string_view name, std::function<void()> work);

  Ops& ops() noexcept override { return *ops_; }
  UpdateKernels& host_kernels() noexcept override { return *host_kernels_; }

 private:
  HostStream& own(StreamView stream) const;
  void move(void* to, const void* from, std::size_t bytes, CopyKind kind);

  DeviceInfo info_;
  const std::shared_ptr<const NumaNode> node_;  ///< null: wherever
  const bool pin_;
  const bool refuse_pinning_;
  const Notice pageable_;
  std::shared_ptr<const std::function<void(std::string_view, std::string_view)>> hook_;
  std::shared_ptr<HostDeviceMemory> memory_;
  std::shared_ptr<std::atomic<std::size_t>> pinned_;
  std::shared_ptr<std::atomic<std::size_t>> unpinned_;  ///< bytes of pinned blocks that the system refused to lock
  std::shared_ptr<Pacer> to_device_;
  std::shared_ptr<Pacer> to_host_;                 ///< also used by peers that copy from here
  std::unique_ptr<UpdateKernels> device_kernels_;  ///< kernels of ops_
  std::unique_ptr<UpdateKernels> host_kernels_;
  std::unique_ptr<Ops> ops_;
};

}  // namespace tandem
