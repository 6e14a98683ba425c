#include "api/copy_load.hpp"

#include <array>
#include <chrono>

#include "core/base/start_thread.hpp"
#include "core/base/trace.hpp"

namespace tandem {

void copy_in_pieces(Device& device, void* to, const void* from, std::size_t bytes, CopyKind kind, StreamView stream) {
  in_pieces(bytes, [&](std::size_t at, std::size_t count) {
    device.copy(static_cast<std::byte*>(to) + at, static_cast<const std::byte*>(from) + at, count, kind, stream);
  });
}

CopyLoad::CopyLoad(Device& device, const CopyLoadMemory& memory, StreamView up, StreamView down)
    : device_(device), memory_(memory), up_(up), down_(down) {
  thread_ = start_thread("copies", [this] { run(); });
}

void CopyLoad::stop() noexcept {
  stop_.request_stop();
  if (thread_.joinable()) thread_.join();
}

double CopyLoad::end() {
  stop();
  if (failure_) std::rethrow_exception(failure_);
  return rate_;
}

void CopyLoad::run() noexcept {
  wake_promptly();
  const auto attempt = [this](const auto& action) {
    try {
      action();
    } catch (...) {
      if (!failure_) failure_ = std::current_exception();
    }
  };
  const double began = trace_now();
  attempt([&] { copy_until_stopped(); });
  attempt([&] { device_.synchronize(up_); });
  attempt([&] { device_.synchronize(down_); });  // also where the one before has failed
  rate_ = copied_ / std::max(1e-9, trace_now() - began);
}

/// Two rounds are queued at any time: this thread may wait for a core while what is measured has all of them.
void CopyLoad::copy_until_stopped() {
  const auto events = [this] { return std::array{device_.make_event(), device_.make_event()}; };
  const std::array up_ends = events(), down_ends = events();
  for (std::size_t turn = 0; !stop_.stop_requested(); turn = 1 - turn) {
    copy_in_pieces(device_, memory_.device_target, memory_.host_source, memory_.bytes, CopyKind::host_to_device, up_);
    device_.record(up_ends[turn], up_);
    copy_in_pieces(device_, memory_.host_target, memory_.device_source, memory_.bytes, CopyKind::device_to_host, down_);
    device_.record(down_ends[turn], down_);
    if (copied_ > 0.0) {
      await(up_ends[1 - turn]);
      await(down_ends[1 - turn]);
    }
    copied_ += 2.0 * static_cast<double>(memory_.bytes);
  }
}

void CopyLoad::await(EventView event) {
  while (!device_.wait_for(event, std::chrono::seconds(1))) {
  }
}

}  // namespace tandem
