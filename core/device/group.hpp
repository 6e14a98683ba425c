#pragma once
// Groups of devices that train one model together. Each device has a rank, and its thread sees the others through its
// `Group`.
#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>

#include "core/device/device.hpp"

namespace tandem {

/// One rank of a group of `count`.
struct Rank {
  int index = 0;  ///< from 0 to count - 1
  int count = 1;
  bool operator==(const Rank&) const = default;
};

/// Bytes [begin, end) of a buffer.
struct ByteRange {
  std::size_t begin = 0;
  std::size_t end = 0;
  std::size_t size() const noexcept { return end - begin; }
  bool operator==(const ByteRange&) const = default;
};

/// Independent channels for messages between the host's threads of the ranks: each channel has one thread on every
/// rank, and its calls come in the same order on all ranks.
enum class Channel : std::uint8_t { engine, save };
constexpr int channel_count = 2;

/// One member's end of a group. Calls are collective: every rank makes the same ones with the same sizes, those about
/// device memory in one order, by one thread at a time, and those of a channel in one. None changes a bit: bytes are
/// copied, and whoever adds them up does so in an order of its own. Where a rank has failed, or waits longer than the
/// group's watchdog allows for one that does not come, every call on every rank throws: PeerError that names the
/// rank and what it threw, StalledError.
class Group {
 public:
  virtual ~Group() = default;

  virtual Rank rank() const noexcept = 0;

  /// Gathers `buffer`, on the device: part r is rank r's own; afterwards all ranks have all parts. `parts`: one for
  /// each rank, apart from each other, any of them empty. Blocks until every rank has made the call; the copies are
  /// queued on `stream`. Once that has passed them, every other rank has also read its copies from here.
  virtual void all_gather(std::byte* buffer, std::span<const ByteRange> parts, StreamView stream) = 0;
  /// Gives rank q part q of every other rank's `from`. `to` receives this rank's part from the ranks below it and then
  /// from those above it, one after another, each of parts[its index].size() bytes. `from` and `to` are on the device
  /// and do not overlap. Blocks, queues and ends as `all_gather`.
  virtual void all_to_all(const std::byte* from, std::span<const ByteRange> parts, std::byte* to,
                          StreamView stream) = 0;

  /// Copies `bytes` of rank `root`, in host memory, to all ranks. Blocks.
  virtual void broadcast(Channel channel, int root, std::span<std::byte> bytes) = 0;
  /// Copies `bytes` of rank `from`, in host memory, to rank `to`, and to no other: bytes of the other ranks are neither
  /// read nor written. A call of all ranks, with as many bytes on each. Blocks.
  virtual void send(Channel channel, int from, int to, std::span<std::byte> bytes) = 0;

  /// Reports that this rank cannot go on, which ends the calls of all ranks, later ones too. Errors name the first rank
  /// that failed.
  virtual void fail(std::exception_ptr error) noexcept = 0;
  /// Ends this rank's part in the group: it makes no more calls, and the memory that it has shown is about to be freed.
  /// Blocks until no other rank reads that memory, at most for the watchdog's time. In every call that this one has not
  /// completed the others see a failed rank. The destructor does so too.
  virtual void leave() noexcept = 0;
};

}  // namespace tandem
