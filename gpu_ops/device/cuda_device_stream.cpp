#include "gpu_ops/device/cuda_device_stream.hpp"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/start_thread.hpp"

namespace tandem {

namespace runtime = gpu::runtime;
using namespace std::chrono_literals;

namespace {

/// Whether a handle is cudaStreamPerThread, another stream in each thread. Its number is part of CUDA's interface.
bool is_per_thread(CUstream_st* handle) noexcept { return reinterpret_cast<std::uintptr_t>(handle) == 2; }

}  // namespace

// -- stream ------------------------------------------------------------------------------------------

CudaStream::CudaStream(std::string name, int ordinal, const void* owner, runtime::OwnedStream native)
    : name_(std::move(name)), ordinal_(ordinal), owner_(owner), owned_(std::move(native)), native_(owned_.get()) {
  start();
}

CudaStream::CudaStream(std::string name, int ordinal, const void* owner, CUstream_st* native)
    : name_(std::move(name)),
      ordinal_(ordinal),
      owner_(owner),
      native_(native),
      wrapped_in_(is_per_thread(native) ? std::this_thread::get_id() : std::thread::id()) {
  start();
}

bool CudaStream::of_this_thread() const noexcept {
  return wrapped_in_ == std::thread::id() || wrapped_in_ == std::this_thread::get_id();
}

void CudaStream::require_thread() const {
  if (of_this_thread()) return;
  throw MisuseError("stream '" + name_ + "' is used in another thread than the one that wrapped it",
                    "cudaStreamPerThread is another stream in each thread", "wrap a stream of your own");
}

void CudaStream::start() {
  caller_ = start_thread(name_, [this] { serve(); });
}

CudaStream::~CudaStream() {
  if (of_this_thread()) runtime::finish(ordinal_, native_);
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
    called_.notify_one();
  }
  caller_.join();
}

void CudaStream::fail(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  if (!error_) error_ = std::move(error);
}

std::exception_ptr CudaStream::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

runtime::OwnedEvent CudaStream::take_event() {
  const std::lock_guard lock(mutex_);
  if (spare_.empty()) return runtime::make_event(ordinal_);
  runtime::OwnedEvent event = std::move(spare_.back());
  spare_.pop_back();
  return event;
}

void CudaStream::synchronize() {
  runtime::OwnedEvent end;
  queue([&] {
    end = take_event();
    runtime::record(end.get(), native_);
    runtime::synchronize(end.get());
  });
  if (const std::exception_ptr failure = error()) {
    runtime::finish(ordinal_, native_);
    std::rethrow_exception(failure);
  }
  const std::lock_guard lock(mutex_);
  spare_.push_back(std::move(end));
}

void CudaStream::call_after(std::function<void(std::exception_ptr)> then) {
  if (!then) throw MisuseError("empty call queued on stream '" + name_ + "'");
  Call call{.event = nullptr, .error = nullptr, .then = std::move(then)};
  queue([&] {
    call.event = take_event();
    runtime::record(call.event.get(), native_);
  });
  call.error = error();
  if (call.error) mark_failed(call);
  const std::lock_guard lock(mutex_);
  calls_.push_back(std::move(call));
  called_.notify_one();
}

/// Work queued before the failure may still run, and whoever is called must not be called earlier.
void CudaStream::mark_failed(Call& call) noexcept {
  try {
    const runtime::CurrentDevice current(ordinal_);
    if (!call.event) call.event = take_event();
    runtime::record(call.event.get(), native_);
  } catch (const runtime::RuntimeError&) {  // a lost device runs nothing any more
    call.event = nullptr;
  }
}

void CudaStream::serve() noexcept {
  wake_promptly();
  std::unique_lock lock(mutex_);
  for (;;) {
    called_.wait(lock, [this] { return !calls_.empty() || ending_; });
    if (calls_.empty()) return;
    Call call = std::move(calls_.front());
    calls_.pop_front();
    lock.unlock();
    call.then(await(call));
    call.then = nullptr;  // destroys the closure's contents outside of the lock
    lock.lock();
    if (call.event) spare_.push_back(std::move(call.event));
  }
}

std::exception_ptr CudaStream::await(const Call& call) noexcept {
  try {
    runtime::use_device(ordinal_);
    if (call.event) runtime::synchronize(call.event.get());
    return call.error;
  } catch (...) {
    if (call.error) return call.error;
    fail(std::current_exception());
    return std::current_exception();
  }
}

// -- event -------------------------------------------------------------------------------------------

CudaEvent::CudaEvent(int ordinal, const void* owner) : ordinal_(ordinal), owner_(owner) {
  const runtime::CurrentDevice current(ordinal);
  native_ = runtime::make_event(ordinal);
}

void CudaEvent::record(CudaStream& stream) {
  const std::lock_guard lock(mutex_);
  stream.queue([&] { runtime::record(native_.get(), stream.native()); });
  error_ = stream.error();
  if (!error_) return;
  try {  // work queued before the failure may still run, and whoever waits must not be told earlier
    const runtime::CurrentDevice current(ordinal_);
    runtime::record(native_.get(), stream.native());
  } catch (const runtime::RuntimeError&) {  // a lost device runs nothing any more
  }
}

void CudaEvent::hold(CudaStream& stream) {
  const std::lock_guard lock(mutex_);
  if (error_) return stream.fail(error_);
  stream.queue([&] { runtime::wait(stream.native(), native_.get()); });
}

/// A failed stream may keep the runtime from answering; that is no error of its own.
bool CudaEvent::has_passed() const {
  try {
    const runtime::CurrentDevice current(ordinal_);
    return runtime::passed(native_.get());
  } catch (const runtime::RuntimeError&) {
    if (error_) return true;
    throw;
  }
}

bool CudaEvent::wait_for(std::chrono::milliseconds time) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point end = Clock::now() + time;
  // CUDA knows no wait that ends by itself: asked from time to time, seldom once it has taken long.
  for (std::chrono::microseconds pause = 20us;; pause = std::min<std::chrono::microseconds>(2 * pause, 1ms)) {
    {
      const std::lock_guard lock(mutex_);
      if (has_passed()) {
        if (error_) std::rethrow_exception(error_);
        return true;
      }
    }
    const Clock::time_point now = Clock::now();
    if (now >= end) return false;
    std::this_thread::sleep_for(std::min<Clock::duration>(pause, end - now));
  }
}

}  // namespace tandem
