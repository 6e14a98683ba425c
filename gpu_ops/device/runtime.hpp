#pragma once
// All calls of the CUDA device to the CUDA runtime: the one file behind this header is linked against the real runtime
// in programs and against a fake of it in tests. Functions act on the device that is current in the calling thread
// (CurrentDevice), on a default stream only where the caller has wrapped one, and never wait for the whole device.
// Where no device is current, CUDA takes device 0 and makes a context there, which takes hundreds of MiB; functions
// that free something, which any thread may call, are therefore given the device. A call that the runtime refuses
// throws DeviceError with the name of the error. Internal to gpu_ops.
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "core/base/error.hpp"
#include "core/device/device.hpp"

struct CUevent_st;
struct CUstream_st;

namespace tandem::gpu::runtime {

/// A refusal of the runtime. `lost()`: the device is of no more use to this process; every later call
/// fails too, and work in flight has been dropped.
class RuntimeError : public DeviceError {
 public:
  RuntimeError(std::string_view what, std::string_view why, bool lost)
      : DeviceError(what, why, lost ? "start again from the last checkpoint" : ""), lost_(lost) {}
  bool lost() const noexcept { return lost_; }

 private:
  bool lost_;
};

/// CUDA's way to write versions: 13020 is 13.2.
struct Versions {
  int runtime = 0;  ///< version that this build was made with
  int driver = 0;   ///< newest that the driver supports; 0: no driver
};
Versions versions();

/// How many devices there are, or why none: `error` is then the runtime's own word.
struct DeviceCount {
  int devices = 0;
  bool driver_too_old = false;
  std::string error;
};
DeviceCount count_devices();

struct DeviceFacts {
  std::string name;
  int major = 0;  ///< compute capability
  int minor = 0;
  int multiprocessors = 0;
  std::size_t cache_bytes = 0;  ///< bytes of the last-level cache
  std::string pci_bus;          ///< "0000:65:00.0"
};
DeviceFacts facts_of(int ordinal);

/// Makes the context of a device, which takes memory there, where this process has none yet; it stays until the process
/// ends. Does not make it current. Blocks.
void make_context(int ordinal);
/// Compute capability of the current device: 90 is 9.0.
int compute_capability();
/// Makes a device current in this thread, for good.
void use_device(int ordinal);
/// Makes a device current, which gets its context, and what was current before once it goes: that may be none. The
/// runtime could only go back to some device, and would make a context there.
class CurrentDevice {
 public:
  explicit CurrentDevice(int ordinal);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  bool pushed_ = false;  ///< false: it was current before
};

// -- memory ------------------------------------------------------------------------------------------

struct FreeMemory {
  std::size_t free = 0;
  std::size_t total = 0;
};
FreeMemory free_memory();
/// Null where the device has no more.
void* allocate(std::size_t bytes);
void free(int ordinal, void* data) noexcept;
/// Lets copies reach whole pages of host memory at full speed, from every device.
void register_host(void* data, std::size_t bytes);
void unregister_host(int ordinal, void* data) noexcept;

// -- streams and events ------------------------------------------------------------------------------

struct StreamCloser {
  int ordinal = 0;
  void operator()(CUstream_st* stream) const noexcept;
};
struct EventCloser {
  int ordinal = 0;
  void operator()(CUevent_st* event) const noexcept;
};
using OwnedStream = std::unique_ptr<CUstream_st, StreamCloser>;
using OwnedEvent = std::unique_ptr<CUevent_st, EventCloser>;

/// Stream of device `ordinal`, which is current. Does not synchronise with the default stream. `name` is for profilers,
/// `priority` for kernels alone.
OwnedStream make_stream(int ordinal, const std::string& name, StreamPriority priority);
/// Blocks until what is queued is done, or dropped.
void finish(int ordinal, CUstream_st* stream) noexcept;
/// Event of device `ordinal`, which is current. Without timing; whoever waits for it sleeps.
OwnedEvent make_event(int ordinal);
void record(CUevent_st* event, CUstream_st* stream);
void wait(CUstream_st* stream, CUevent_st* event);
bool passed(CUevent_st* event);
/// Blocks.
void synchronize(CUevent_st* event);

// -- work --------------------------------------------------------------------------------------------

void copy(void* to, const void* from, std::size_t bytes, CopyKind kind, CUstream_st* stream);
/// Copies between two different devices, `to` and `stream` on device `to_ordinal`.
void copy_peer(void* to, int to_ordinal, const void* from, int from_ordinal, std::size_t bytes, CUstream_st* stream);
/// Whether copies come straight from a peer; `shared`: somebody in this process has enabled that before.
enum class PeerAccess { none, enabled, shared };
/// Lets copies to device `ordinal`, which is current, come straight from `peer`, another one, where the machine can do
/// that. Where it cannot, or refuses, they pass through the host.
PeerAccess enable_peer(int ordinal, int peer);
/// Has copies to the device that is current pass through the host again.
void disable_peer(int peer);
void fill(void* to, unsigned char byte, std::size_t bytes, CUstream_st* stream);

/// Checks the cudaError_t that the launch of a kernel returned: throws where the launch was refused, or reports the
/// fault of an earlier kernel, which loses the device.
void require_launched(int result, std::string_view kernel);
/// Checks for a lost device, after a library that queues work said only that it failed: throws where the device is
/// lost, which its stream then reports. Does not block.
void require_alive(CUstream_st* stream, std::string_view what);

}  // namespace tandem::gpu::runtime
