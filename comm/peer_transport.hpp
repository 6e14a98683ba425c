#pragma once
// The interface of whatever moves bytes of device memory between ranks in several processes.
#include <cstddef>
#include <span>
#include <string_view>

#include "comm/rendezvous.hpp"
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
  /// Throws MisuseError where [data, data + bytes), with which a call is about to do what `action` says ("copy between
  /// ranks reads"), is not memory of the device. A transport whose calls end before they return sees that by itself.
  virtual void require_memory(const void* /*data*/, std::size_t /*bytes*/, std::string_view /*action*/) const {}
  /// Blocks until no copy that was queued is still to be made, at most for the watchdog's time.
  virtual void drain() noexcept {}
  /// Bytes of device memory that connections take beside what the device has allocated.
  virtual std::size_t device_bytes() const noexcept { return 0; }
};

/// Stops a transport as soon as the group ends by a failure, while this lives: for the time before a group does so.
class StopWhenBroken {
 public:
  StopWhenBroken(Rendezvous& rendezvous, PeerTransport& transport) : rendezvous_(rendezvous) {
    rendezvous_.when_broken([&transport] { transport.stop(); });
  }
  ~StopWhenBroken() { rendezvous_.when_broken(nullptr); }
  StopWhenBroken(const StopWhenBroken&) = delete;
  StopWhenBroken& operator=(const StopWhenBroken&) = delete;

 private:
  Rendezvous& rendezvous_;
};

}  // namespace tandem
