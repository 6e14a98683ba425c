#pragma once
// The interface of whatever moves bytes of device memory between ranks in several processes.
#include <cstddef>
#include <span>

#include "core/device/group.hpp"

namespace tandem {

/// Moves the bytes of calls on which all ranks have agreed: each method is called by every rank with the same parts, in
/// one order, by one thread at a time. Parts and destinations are those of `Group`. A transport that has thrown is not
/// used again.
class PeerTransport {
 public:
  virtual ~PeerTransport() = default;

  /// Returns when the copies are done or queued on `stream`, as `Group::all_gather`. Throws PeerError where another
  /// rank's end or `stop` keeps them from it, StalledError; once it has thrown, nothing uses the memory any more.
  virtual void all_gather(std::byte* buffer, std::span<const ByteRange> parts, StreamView stream) = 0;
  virtual void all_to_all(const std::byte* from, std::span<const ByteRange> parts, std::byte* to,
                          StreamView stream) = 0;
  /// Makes the call under way throw, and all later ones. From any thread; short.
  virtual void stop() noexcept = 0;
};

}  // namespace tandem
