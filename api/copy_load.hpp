#pragma once
// Copies both ways for as long as something else is measured beside them. Internal to api.
#include <algorithm>
#include <cstddef>
#include <exception>
#include <stop_token>
#include <thread>

#include "core/device/device.hpp"

namespace tandem {

/// Calls copy(at, count) for pieces of `bytes` as large as those of a run, since the rate of a copy may depend on its
/// size.
template <class Copy>
void in_pieces(std::size_t bytes, Copy copy) {
  constexpr std::size_t piece = std::size_t{16} << 20;
  for (std::size_t at = 0; at < bytes; at += piece) copy(at, std::min(piece, bytes - at));
}

/// Queues a copy in pieces; blocks and throws as Device::copy does.
void copy_in_pieces(Device& device, void* to, const void* from, std::size_t bytes, CopyKind kind, StreamView stream);

/// Host and device buffers of a copy load: `bytes` are copied each way.
struct CopyLoadMemory {
  const void* host_source;
  void* device_target;
  const void* device_source;
  void* host_target;
  std::size_t bytes;
};

/// Copies from its construction until its end, on a thread of its own.
class CopyLoad {
 public:
  /// All references must outlive the object, and both streams are its own meanwhile. Throws DeviceError.
  CopyLoad(Device& device, const CopyLoadMemory& memory, StreamView up, StreamView down);
  /// Nothing uses the memory any more when it is gone.
  ~CopyLoad() { stop(); }
  CopyLoad(const CopyLoad&) = delete;
  CopyLoad& operator=(const CopyLoad&) = delete;

  /// Blocks until all that is queued has been copied. The rate of both ways together, bytes a second. Throws what a
  /// copy did.
  double end();

 private:
  void stop() noexcept;
  void run() noexcept;
  void copy_until_stopped();
  void await(EventView event);

  Device& device_;
  const CopyLoadMemory memory_;
  const StreamView up_, down_;
  double copied_ = 0.0;  ///< bytes
  double rate_ = 0.0;
  std::exception_ptr failure_;
  std::stop_source stop_;
  std::thread thread_;  ///< last: it uses all of the above
};

}  // namespace tandem
