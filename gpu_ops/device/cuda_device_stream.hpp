#pragma once
// Streams and events of the CUDA device. Internal to gpu_ops.
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/device/device.hpp"
#include "gpu_ops/device/runtime.hpp"

namespace tandem {

/// A native stream, and what CUDA does not keep for it: the failure that its later work is dropped for, and a
/// thread that calls back once work is done. (The runtime's own host functions hold up the stream, and are
/// never called once the device is lost.) Methods may be called from any thread.
class CudaStream final : public StreamImpl {
 public:
  /// `owner` tells the streams of one device from those of another. Throws DeviceError when no thread can be had.
  CudaStream(std::string name, int ordinal, const void* owner, gpu::runtime::OwnedStream native);
  /// Around a stream that somebody else keeps, or a default stream.
  CudaStream(std::string name, int ordinal, const void* owner, CUstream_st* native);
  /// Waits for the work queued, and for the calls asked for. Never throws.
  ~CudaStream() override;
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  const std::string& name() const noexcept override { return name_; }
  const void* owner() const noexcept { return owner_; }
  int ordinal() const noexcept { return ordinal_; }
  CUstream_st* native() const noexcept { return native_; }
  /// Throws MisuseError where the handle means another stream in this thread than in the one that wrapped it.
  void require_thread() const;

  /// Runs `call`, which queues something, unless the stream has failed; what it throws fails the stream.
  template <class Call>
  void queue(Call&& call) {
    if (error()) return;
    try {
      const gpu::runtime::CurrentDevice current(ordinal_);
      call();
    } catch (const gpu::runtime::RuntimeError&) {
      fail(std::current_exception());
    }
  }
  /// Fails the stream: later work is dropped, and whoever waits gets the first error.
  void fail(std::exception_ptr error);
  /// The error that failed the stream, or null.
  std::exception_ptr error() const;

  /// Blocks. Rethrows what failed the stream.
  void synchronize();
  void call_after(std::function<void(std::exception_ptr)> then);

 private:
  struct Call {
    gpu::runtime::OwnedEvent event;  ///< null where a lost device gave none
    std::exception_ptr error;
    std::function<void(std::exception_ptr)> then;
  };
  void start();
  bool of_this_thread() const noexcept;
  gpu::runtime::OwnedEvent take_event();
  void mark_failed(Call& call) noexcept;
  void serve() noexcept;
  std::exception_ptr await(const Call& call) noexcept;

  const std::string name_;
  const int ordinal_;
  const void* const owner_;
  const gpu::runtime::OwnedStream owned_;
  CUstream_st* const native_;
  const std::thread::id wrapped_in_;  ///< thread whose stream it is; none: a stream of all threads

  mutable std::mutex mutex_;
  std::exception_ptr error_;
  std::vector<gpu::runtime::OwnedEvent> spare_;
  std::condition_variable called_;
  std::deque<Call> calls_;
  bool ending_ = false;
  std::thread caller_;  ///< last: it uses all of the above
};

/// An event and the failure that its last record carries. Thread-safe.
class CudaEvent final : public EventImpl {
 public:
  CudaEvent(int ordinal, const void* owner);
  const void* owner() const noexcept { return owner_; }

  void record(CudaStream& stream);
  void hold(CudaStream& stream);
  bool wait_for(std::chrono::milliseconds time);

 private:
  bool has_passed() const;
  const int ordinal_;
  const void* const owner_;
  std::mutex mutex_;  ///< a record and its error go together
  gpu::runtime::OwnedEvent native_;
  std::exception_ptr error_;
};

}  // namespace tandem
