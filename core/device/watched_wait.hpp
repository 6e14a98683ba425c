#pragma once
// Waiting for the end of a stream's work, and telling where that does not come: a device may stand still for good.
#include <cstdint>
#include <functional>
#include <string_view>

#include "core/device/device.hpp"

namespace tandem {

/// What is waited for, and how long without a word.
struct Watch {
  std::string_view what;         ///< "losses": how a stall calls it
  double limit_seconds = 300.0;  ///< without any progress
  /// Counts what has been done meanwhile; empty: nothing tells of progress before the end.
  std::function<std::uint64_t()> made{};
};

/// Blocks until everything queued so far on `stream` is done, as Device::synchronize does. Where nothing moves for the
/// limit, that is told as a stall (`report_stall`), and the wait goes on: for work that uses memory which an exception
/// would take away under it. A copy that blocks in the call that queues it, as CUDA's do where the host's memory is not
/// pinned, is over before. Throws what failed the stream.
void wait_to_the_end(Device& device, StreamView stream, const Watch& watch);

/// The same, but gives up after that: throws StalledError. What is queued may still run, and use what it uses.
void wait_or_give_up(Device& device, StreamView stream, const Watch& watch);

}  // namespace tandem
