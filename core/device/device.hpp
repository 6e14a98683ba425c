#pragma once
// The interface of devices, with their streams and events. A stream is an ordered queue of work; an event marks a point
// in it. Owners (`Stream`, `Event`) and views (`StreamView`, `EventView`) are two types; a view must not outlive its
// owner.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "core/memory/memory.hpp"

namespace tandem {

class Ops;
class RangeSink;
class UpdateKernels;

/// Receives one line of text that people should know.
using Notice = std::function<void(const std::string&)>;

/// A backend's stream. Destroying it waits for the work queued on it, and never throws.
class StreamImpl : public std::enable_shared_from_this<StreamImpl> {
 public:
  StreamImpl() = default;
  StreamImpl(const StreamImpl&) = delete;
  StreamImpl& operator=(const StreamImpl&) = delete;
  virtual ~StreamImpl() = default;
  virtual const std::string& name() const noexcept = 0;
};

/// A backend's event.
class EventImpl {
 public:
  virtual ~EventImpl() = default;
};

class StreamView {
 public:
  StreamView() = default;
  explicit StreamView(StreamImpl* impl) : impl_(impl) {}
  StreamImpl* impl() const noexcept { return impl_; }
  explicit operator bool() const noexcept { return impl_ != nullptr; }
  bool operator==(const StreamView&) const = default;
  /// Shares the stream with its owner: it lives as long as what is returned. Null for an empty view.
  std::shared_ptr<StreamImpl> share() const { return impl_ == nullptr ? nullptr : impl_->weak_from_this().lock(); }

 private:
  StreamImpl* impl_ = nullptr;
};

class Stream {
 public:
  Stream() = default;
  explicit Stream(std::unique_ptr<StreamImpl> impl) : impl_(std::move(impl)) {}
  Stream(Stream&&) = default;
  Stream& operator=(Stream&&) = default;
  operator StreamView() const& noexcept { return StreamView(impl_.get()); }  // NOLINT: a view of it is meant
  operator StreamView() const&& = delete;                                    // the view would outlive it

 private:
  std::shared_ptr<StreamImpl> impl_;
};

class EventView {
 public:
  EventView() = default;
  explicit EventView(EventImpl* impl) : impl_(impl) {}
  EventImpl* impl() const noexcept { return impl_; }
  explicit operator bool() const noexcept { return impl_ != nullptr; }

 private:
  EventImpl* impl_ = nullptr;
};

class Event {
 public:
  Event() = default;
  explicit Event(std::unique_ptr<EventImpl> impl) : impl_(std::move(impl)) {}
  operator EventView() const& noexcept { return EventView(impl_.get()); }  // NOLINT: a view of it is meant
  operator EventView() const&& = delete;                                   // the view would outlive it
  explicit operator bool() const noexcept { return impl_ != nullptr; }

 private:
  std::unique_ptr<EventImpl> impl_;
};

enum class CopyKind : std::uint8_t { host_to_device, device_to_host, device_to_device };

struct DeviceInfo {
  std::string kind;          ///< "host" or "cuda"
  std::string name;          ///< "host", "cuda:0 NVIDIA H200"
  std::size_t capacity = 0;  ///< hard ceiling in bytes of what may be allocated on it
  std::size_t reserved = 0;  ///< bytes that context and libraries take: with `capacity`, the ceiling that the user gave
  /// Bytes of pinned memory that the driver maps with one byte of `capacity`; 0: mapping takes none.
  std::size_t pinned_per_page_table = 0;
  std::size_t cache_bytes = 0;  ///< bytes of the device's own last-level caches; 0: it has the host's
  int threads = 0;              ///< threads of the host device's kernels; 0 elsewhere
  std::string compute_key;      ///< everything about the device that may change a bit: kind, model, libraries, threads
};

/// Priority hint for kernels of a stream. `first`: on a GPU, multiprocessors that become free go to this stream before
/// others; for short kernels that others wait for. Without effect on copies and on the host device.
enum class StreamPriority : std::uint8_t { usual, first };

/// An accelerator and the host memory that belongs to it. Must outlive its streams and events. Methods may be called
/// from any thread; work on one stream runs in the order of the calls.
/// Asynchronous methods return without waiting for the work, except for a copy whose host side is not pinned: that may
/// block until the bytes have been read or written. The caller keeps the memory alive until the stream has passed the
/// work.
/// An error in queued work fails the stream: later work on it is dropped, and whoever waits for it gets the exception,
/// also through events on other streams. All methods throw MisuseError for a stream or an event that is empty or of
/// another device.
class Device {
 public:
  virtual ~Device() = default;

  virtual const DeviceInfo& info() const noexcept = 0;

  /// A new stream. `name` identifies it in traces and errors.
  virtual Stream make_stream(std::string_view name = "caller", StreamPriority priority = StreamPriority::usual) = 0;
  /// A stream around a native handle (`cudaStream_t`) of the caller's, which must outlive it. Best a non-blocking one:
  /// a blocking one waits for the legacy default stream. That one (0 or cudaStreamLegacy) is accepted, and so is
  /// cudaStreamPerThread: what is made of it belongs to the calling thread, which alone may use it (MisuseError) and
  /// should destroy it; elsewhere its end is not waited for. Starts a thread: wrap once, not each step. Throws
  /// MisuseError on devices without native streams.
  virtual Stream wrap_stream(void* native) = 0;
  /// Throws MisuseError where the stream is empty or belongs to another device.
  virtual void require_own(StreamView stream) const = 0;
  virtual Event make_event() = 0;

  /// Device memory, uninitialised, aligned to `arena_alignment`. Blocks. Throws PlanError, with names and sizes of the
  /// present allocations, when the capacity would be passed.
  virtual MemoryBlock allocate(std::size_t bytes, std::string_view name) = 0;
  /// Host memory that copies reach at full speed: `bytes` bytes, zeroed, its pages present. Blocks. Where the system
  /// refuses to pin it (a limit of locked memory, WSL2), a device that was not opened as strict leaves it pageable from
  /// some byte on; copies from there are slow and may block the caller. Throws DeviceError.
  virtual MemoryBlock allocate_pinned(std::size_t bytes, std::string_view name) = 0;
  /// Bytes that could not be pinned, of the blocks of `allocate_pinned` that are alive.
  virtual std::size_t pageable_bytes() const noexcept { return 0; }
  virtual std::size_t allocated_bytes() const noexcept = 0;
  virtual std::size_t peak_bytes() const noexcept = 0;

  /// Copies `bytes` bytes. Asynchronous, but may block where the host's memory is not pinned. Source and destination
  /// must stay valid and untouched until `stream` has passed the copy. Device memory must come from `allocate`, an
  /// engine's guards included: MisuseError otherwise, here and in `fill`.
  virtual void copy(void* to, const void* from, std::size_t bytes, CopyKind kind, StreamView stream) = 0;
  /// Copies from the memory of `peer`, a device of the same kind in this process or this one itself, to this device's.
  /// Asynchronous; the source must stay valid and untouched until `stream`, a stream of this device, has passed the
  /// copy. Both sides come from `allocate` of their devices, the peer's alive until then. Throws MisuseError otherwise,
  /// and where the peer is of another kind.
  virtual void copy_from(Device& peer, void* to, const void* from, std::size_t bytes, StreamView stream) = 0;
  /// Sets each of `bytes` bytes to `byte`. Asynchronous.
  virtual void fill(void* to, unsigned char byte, std::size_t bytes, StreamView stream) = 0;
  void fill_zero(void* to, std::size_t bytes, StreamView stream) { fill(to, 0, bytes, stream); }

  /// Marks the present end of `stream`. Recording again moves the mark. Asynchronous.
  virtual void record(EventView event, StreamView stream) = 0;
  /// Later work on `stream` waits for the event's last record; one never recorded is complete. Asynchronous.
  virtual void wait(StreamView stream, EventView event) = 0;
  /// Makes later work on `stream` wait for an event of `peer`, a device of the same kind in this process or this one
  /// itself. Asynchronous. What failed the peer's stream before the record fails this stream. Throws MisuseError where
  /// the peer is of another kind.
  virtual void wait_for_peer(StreamView stream, Device& peer, EventView event) = 0;
  /// Blocks the calling thread until the event's last record has passed or the time is over. Returns whether it has
  /// passed. Rethrows what failed the stream before the record, or lost the device. Which record is meant where the
  /// event is recorded again meanwhile, the one before or the new one, depends on the device: record it again only once
  /// nobody waits.
  virtual bool wait_for(EventView event, std::chrono::milliseconds time) = 0;
  /// Calls `then` once everything queued on `stream` so far is done, with null, or with the error that failed the
  /// stream. Called exactly once, on a thread of the device's, or within this call where all of it is done already;
  /// `then` must be short, must not throw and must not call the device. Asynchronous.
  virtual void call_after(StreamView stream, std::function<void(std::exception_ptr)> then) = 0;
  /// Blocks until everything queued on `stream` is done. Rethrows the error that failed it.
  virtual void synchronize(StreamView stream) = 0;

  /// Receiver of named ranges of the work on this device and for it, owned by the device; null where no profiler
  /// listens.
  virtual RangeSink* ranges() noexcept { return nullptr; }

  /// Mathematics on this device.
  virtual Ops& ops() noexcept = 0;
  /// Optimizer arithmetic on the CPU over the host memory of this device.
  virtual UpdateKernels& host_kernels() noexcept = 0;
};

}  // namespace tandem
