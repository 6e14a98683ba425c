#include "comm/nccl/communicator.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/stall.hpp"
#include "core/base/trace.hpp"

namespace tandem::nccl {
namespace {

using namespace std::chrono_literals;

constexpr std::chrono::microseconds shortest_pause = 20us, longest_pause = 2ms;  // between two looks

}  // namespace

void Communicator::connect(const UniqueId& id, Rank rank) {
  Config config;
  config.blocking = 0;
  {
    const std::lock_guard lock(mutex_);
    require_going();
    check(library_.init_rank(&comm_, rank.count, id, rank.index, &config), "connecting");
  }
  settle("connecting");
}

void Communicator::require_going() const {
  if (ended_) throw PeerError("the ranks' connections by NCCL are no longer used");
}

void Communicator::check(int result, std::string_view what) const {
  if (result == success || result == in_progress) return;
  throw DeviceError(fmt::format("{} by NCCL {} failed", what, version_text(library_.version)),
                    library_.describe(result), "NCCL_DEBUG=WARN has NCCL say more");
}

void Communicator::exchange(std::span<const Transfer> transfers, CUstream_st* stream, std::string_view what) {
  {
    const std::lock_guard lock(mutex_);
    require_going();
    queue(transfers, stream, what);
  }
  // Until then nothing need be on the stream: NCCL connects ranks when they first exchange, on a thread of its own.
  settle(what);
}

// A group that was started is ended whatever happens: else it would go on in the next call of the thread.
void Communicator::queue(std::span<const Transfer> transfers, CUstream_st* stream, std::string_view what) {
  check(library_.group_start(), what);
  int result = success;
  const auto go_on = [&](int next) {
    if (result == success || result == in_progress) result = next;
  };
  for (const Transfer& each : transfers) {
    if (each.sent_bytes > 0) go_on(library_.send(each.sent, each.sent_bytes, byte_type, each.to, comm_, stream));
    if (each.received_bytes > 0) {
      go_on(library_.receive(each.received, each.received_bytes, byte_type, each.from, comm_, stream));
    }
  }
  go_on(library_.group_end());
  check(result, what);
}

void Communicator::settle(std::string_view what) {
  ProgressWatch watch(limit_seconds_, 0);
  std::unique_lock lock(mutex_);
  for (auto pause = shortest_pause;; pause = std::min(2 * pause, longest_pause)) {
    require_going();
    int state = success;
    check(library_.get_async_error(comm_, &state), what);
    check(state, what);
    if (state == success) return;
    if (const auto seconds = watch.stalled(0)) {
      const StalledError error = stalled(fmt::format("{} of the group", what), *seconds, "NCCL");
      report_stall(error);
      throw error;
    }
    aborted_.wait_for(lock, pause);
  }
}

std::optional<std::string> Communicator::failure() {
  const std::lock_guard lock(mutex_);
  if (comm_ == nullptr) return std::nullopt;
  int state = success;
  int result = library_.get_async_error(comm_, &state);
  if (result == success) result = state;
  if (result == success || result == in_progress) return std::nullopt;
  return library_.describe(result);
}

void Communicator::finish() noexcept {
  try {
    {
      const std::lock_guard lock(mutex_);
      if (comm_ == nullptr) return;
      check(library_.finalize(comm_), "finishing");
    }
    settle("finishing");
    const std::lock_guard lock(mutex_);
    ended_ = true;
    if (ncclComm* const comm = std::exchange(comm_, nullptr)) static_cast<void>(library_.destroy(comm));
  } catch (...) {  // aborted later: all calls have ended before
  }
}

void Communicator::abort() noexcept {
  const std::lock_guard lock(mutex_);
  ended_ = true;
  if (ncclComm* const comm = std::exchange(comm_, nullptr)) static_cast<void>(library_.abort(comm));
  aborted_.notify_all();
}

}  // namespace tandem::nccl
