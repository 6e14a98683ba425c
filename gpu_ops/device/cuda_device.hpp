#pragma once
// The CUDA device. No header of CUDA is seen here.
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "core/device/device.hpp"
#include "core/device/device_allocator.hpp"
#include "core/host/numa_node.hpp"
#include "core/ops/ops.hpp"
#include "core/ops/update_kernels.hpp"

namespace tandem {

class CudaDeviceMemory;
class CudaEvent;
class CudaPeers;
class CudaPinnedMemory;
class CudaStream;
class NvtxRanges;

/// Result of looking for CUDA devices. `why_none` is for people, and empty where a device can be used.
struct CudaProbe {
  int devices = 0;        ///< number of devices that the driver shows
  int first_usable = -1;  ///< ordinal of the first that can be used; -1: none
  std::string why_none;   ///< "no NVIDIA driver is installed"
};
/// Asks the driver; takes no device memory. Does not throw.
CudaProbe probe_cuda();

struct CudaDeviceOptions {
  int ordinal = 0;
  std::size_t memory = 0;  ///< ceiling in bytes of all that the process takes there; 0: what is free, less a margin
  DeviceAllocator allocator{};  ///< source of device memory, whose ceiling then need not be free; none: the driver
  std::size_t pinned_piece = std::size_t{256} << 20;  ///< bytes of host memory registered at once, a multiple of 2 MiB
  Notice pageable{};           ///< told where host memory cannot be pinned and stays pageable; empty: that is an error
  Notice slower_peers{};       ///< told where copies from another card go through the host, as straight ones go wrong
  bool under_windows = false;  ///< Windows has the card and needs memory of it: the margin without a ceiling is larger
  /// Makes the mathematics, and says what of it enters the compute key. Called with the device current.
  std::function<std::unique_ptr<Ops>()> make_ops{};
  std::function<std::string()> ops_key{};
  int numa_node = -1;  ///< NUMA node of pinned memory and the CPU update's threads; -1: the GPU's own
  /// Makes the CPU's update kernels, to run near memory of the node (null: anywhere).
  std::function<std::unique_ptr<UpdateKernels>(std::shared_ptr<const NumaNode>)> make_host_kernels{};
};

/// A GPU. Outlives its streams and events; memory blocks may outlive it. Methods leave the calling thread's
/// current device as it was, but for `ops()`: whatever queues kernels makes this device current (see
/// native_stream). CUDA knows no failure of one stream by what runs on it: a fault in a kernel loses the
/// device, and every stream fails.
class CudaDevice final : public Device {
 public:
  /// Makes the context, loads the libraries and measures what they take. Throws DeviceError where the device
  /// is not there or cannot be used, PlanError where the ceiling asked for is more than is free, or less than
  /// context and libraries take.
  explicit CudaDevice(CudaDeviceOptions options);
  ~CudaDevice() override;
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  /// `capacity` is the ceiling less `reserved`, which context and libraries take.
  const DeviceInfo& info() const noexcept override { return info_; }
  /// Throws DeviceError.
  Stream make_stream(std::string_view name, StreamPriority priority = StreamPriority::usual) override;
  /// A `cudaStream_t` of this device; a default stream's handle means that of this device.
  Stream wrap_stream(void* native) override;
  void require_own(StreamView stream) const override;
  /// Throws MisuseError where [data, data + bytes) does not lie in one live allocation of this device. `action` says
  /// what is to be done with it: "copy reads".
  void require_inside(const void* data, std::size_t bytes, std::string_view action) const;
  Event make_event() override;

  MemoryBlock allocate(std::size_t bytes, std::string_view name) override;
  MemoryBlock allocate_pinned(std::size_t bytes, std::string_view name) override;
  std::size_t pageable_bytes() const noexcept override;
  std::size_t allocated_bytes() const noexcept override;
  std::size_t peak_bytes() const noexcept override;
  /// Bytes that are pinned, of the blocks of `allocate_pinned` that are alive.
  std::size_t pinned_bytes() const noexcept;

  /// Throws MisuseError at the call where the device side does not lie in one live allocation, or the host
  /// side does. Host memory that is not pinned is copied too, but may block the caller.
  void copy(void* to, const void* from, std::size_t bytes, CopyKind kind, StreamView stream) override;
  /// Copies from another CUDA device or this one; two devices may also be one card. The copy goes straight from card to
  /// card where they have access to each other, and bytes that are copied so at the first call, which waits for them,
  /// arrive as they are; otherwise through the host.
  void copy_from(Device& peer, void* to, const void* from, std::size_t bytes, StreamView stream) override;
  void fill(void* to, unsigned char byte, std::size_t bytes, StreamView stream) override;

  void record(EventView event, StreamView stream) override;
  void wait(StreamView stream, EventView event) override;
  /// A peer that is lost while its work runs is told of by its own streams alone.
  void wait_for_peer(StreamView stream, Device& peer, EventView event) override;
  /// Asks from time to time, a millisecond apart at most. Follows the mark where it is moved meanwhile.
  bool wait_for(EventView event, std::chrono::milliseconds time) override;
  /// Calls `then` on a thread of the stream's own; the stream does not wait for it.
  void call_after(StreamView stream, std::function<void(std::exception_ptr)> then) override;
  void synchronize(StreamView stream) override;

  /// NVTX ranges, where a profiler was attached when the device was opened.
  RangeSink* ranges() noexcept override;
  Ops& ops() noexcept override { return *ops_; }
  UpdateKernels& host_kernels() noexcept override { return *host_kernels_; }

 private:
  CudaStream& own(StreamView stream) const;
  CudaEvent& own(EventView event) const;

  const int ordinal_;
  DeviceInfo info_;
  std::shared_ptr<CudaDeviceMemory> memory_;
  std::shared_ptr<CudaPinnedMemory> pinned_;
  const std::unique_ptr<NvtxRanges> ranges_;  ///< null: nobody listens
  std::unique_ptr<UpdateKernels> host_kernels_;
  std::unique_ptr<Ops> ops_;
  const std::unique_ptr<CudaPeers> peers_;
};

}  // namespace tandem
