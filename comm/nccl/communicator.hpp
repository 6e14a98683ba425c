#pragma once
// One rank's end of a communicator of NCCL.
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "comm/nccl/nccl_library.hpp"
#include "core/device/group.hpp"

namespace tandem::nccl {

/// Bytes of device memory that go to another rank and come from it, at once. Either may be nothing.
struct Transfer {
  int to = 0;
  const std::byte* sent = nullptr;
  std::size_t sent_bytes = 0;
  int from = 0;
  std::byte* received = nullptr;
  std::size_t received_bytes = 0;
};

/// Thread-safe: NCCL's calls are made one at a time, and each is short, as the communicator is one that does not block.
/// So any thread may end what another waits for.
class Communicator {
 public:
  /// `limit_seconds`: how long a call of this class waits for NCCL.
  Communicator(const Library& library, double limit_seconds) : library_(library), limit_seconds_(limit_seconds) {}
  /// Aborts what was not finished.
  ~Communicator() { abort(); }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  /// Connects with the other ranks, which do so at once with the same id, on the device that is current. To be called
  /// once, and first. Blocks. Throws as `exchange`.
  void connect(const UniqueId& id, Rank rank);
  /// Queues all transfers on `stream` as one, so that none waits for the end of another. Blocks until they are queued.
  /// `what`: the name of the call in errors. Throws PeerError after `abort`, StalledError, DeviceError with NCCL's
  /// words.
  void exchange(std::span<const Transfer> transfers, CUstream_st* stream, std::string_view what);

  /// Error that NCCL has met outside of calls, in words. Nothing after `abort`.
  std::optional<std::string> failure();
  /// Frees the communicator once all bytes are out, at most for the limit. To be called when the stream has passed all
  /// exchanges. Blocks; leaves to the destructor what does not end.
  void finish() noexcept;
  /// Ends all exchanges, whose bytes then mean nothing, and frees the communicator. Streams go on soon afterwards. Does
  /// not wait for other ranks.
  void abort() noexcept;

 private:
  void require_going() const;
  void check(int result, std::string_view what) const;
  void queue(std::span<const Transfer> transfers, CUstream_st* stream, std::string_view what);
  void settle(std::string_view what);

  const Library& library_;
  const double limit_seconds_;
  std::mutex mutex_;
  std::condition_variable aborted_;
  ncclComm* comm_ = nullptr;  ///< null before it connects, and once it is freed
  bool ended_ = false;        ///< aborted or finished
};

}  // namespace tandem::nccl
