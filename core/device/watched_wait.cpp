#include "core/device/watched_wait.hpp"

#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>

#include "core/base/stall.hpp"

namespace tandem {
namespace {

/// The end of what was queued on a stream. Shared with the device's call, which may come after whoever waited is gone.
class End {
 public:
  void reached(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    error_ = std::move(error);
    reached_ = true;
    changed_.notify_all();
  }
  /// Waits for the end; returns the error that failed the stream, or null. `still` is called at each tick, and may
  /// throw.
  template <class Still>
  std::exception_ptr wait(Still still) {
    std::unique_lock lock(mutex_);
    while (!changed_.wait_for(lock, watch_tick, [this] { return reached_; })) still();
    return error_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  std::exception_ptr error_;
};

template <class OnStall>
void wait(Device& device, StreamView stream, const Watch& watch, OnStall on_stall) {
  const auto made = [&] { return watch.made ? watch.made() : 0; };
  const auto end = std::make_shared<End>();
  device.call_after(stream, [end](std::exception_ptr error) { end->reached(std::move(error)); });
  ProgressWatch progress(watch.limit_seconds, made());
  const auto error = end->wait([&] {
    const auto seconds = progress.stalled(made());
    if (seconds) on_stall(stalled(watch.what, *seconds, device.info().name));
  });
  if (!error) return;
  // Work queued before the failure may still run.
  device.synchronize(stream);
  std::rethrow_exception(error);
}

}  // namespace

void wait_to_the_end(Device& device, StreamView stream, const Watch& watch) {
  wait(device, stream, watch, [](const StalledError& error) { report_stall(error); });
}

void wait_or_give_up(Device& device, StreamView stream, const Watch& watch) {
  wait(device, stream, watch, [](const StalledError& error) {
    report_stall(error);
    throw error;
  });
}

}  // namespace tandem
