#pragma once
// Waits for the end of a stream's work that report a stall: a device may stand still for good.
#include <cstdint>
#include <functional>
#include <string_view>

#include "core/device/device.hpp"

namespace tandem {

/// Name and time limit of a watched wait.
struct Watch {
  std::string_view what;         ///< "losses": the name in a stall's error
  double limit_seconds = 300.0;  ///< without any progress
  /// Counts what has been done meanwhile; empty: nothing tells of progress before the end.
  std::function<std::uint64_t()> made{};
};

/// Blocks until everything queued so far on `stream` is done, as Device::synchronize does. Without progress for the
/// limit, reports a stall (`report_stall`) and waits on: for work on memory that an exception would free too early. A
/// copy that blocks in the call that queues it, as CUDA's do where host memory is not pinned, has ended before.
/// Rethrows what failed the stream.
void wait_to_the_end(Device& device, StreamView stream, const Watch& watch);

/// Blocks like `wait_to_the_end`, but throws StalledError without progress for the limit. Queued work may still run
/// then, and use its memory.
void wait_or_give_up(Device& device, StreamView stream, const Watch& watch);

}  // namespace tandem
