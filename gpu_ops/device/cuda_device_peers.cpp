#include "gpu_ops/device/cuda_device_peers.hpp"

#include <fmt/format.h>

#include <memory>
#include <utility>
#include <vector>

#include "gpu_ops/device/runtime.hpp"

namespace tandem {

namespace runtime = gpu::runtime;

namespace {

/// Gives device memory back.
struct MemoryCloser {
  int ordinal = 0;
  void operator()(void* data) const noexcept { runtime::free(ordinal, data); }
};

/// Memory and a stream of one card, for a copy that is tried.
class Side {
 public:
  explicit Side(int ordinal) : ordinal_(ordinal), data_(nullptr, MemoryCloser{ordinal}) {
    const runtime::CurrentDevice current(ordinal);
    data_.reset(runtime::allocate(CudaPeers::tried_bytes));
    if (!data_) return;
    stream_ = runtime::make_stream(ordinal, "trial of a peer", StreamPriority::usual);
    end_ = runtime::make_event(ordinal);
  }
  ~Side() {
    if (stream_) runtime::finish(ordinal_, stream_.get());
  }
  Side(const Side&) = delete;
  Side& operator=(const Side&) = delete;

  bool there() const noexcept { return data_ != nullptr; }
  void* data() const noexcept { return data_.get(); }
  CUstream_st* stream() const noexcept { return stream_.get(); }
  /// Blocks until what is queued is done. The card is current.
  void wait() const {
    runtime::record(end_.get(), stream_.get());
    runtime::synchronize(end_.get());
  }

 private:
  const int ordinal_;
  std::unique_ptr<void, MemoryCloser> data_;
  runtime::OwnedStream stream_;
  runtime::OwnedEvent end_;
};

std::vector<std::byte> pattern() {
  std::vector<std::byte> values(CudaPeers::tried_bytes);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::byte>((i * 7 + i / 251 + 1) & 0xFF);
  return values;
}

}  // namespace

// Asked once by each device: whoever opens one anew may have reset the card, and with it what was enabled.
void CudaPeers::reach(int peer) {
  const std::lock_guard lock(mutex_);
  if (reached_.contains(peer)) return;
  const runtime::PeerAccess access = runtime::enable_peer(ordinal_, peer);
  if (access == runtime::PeerAccess::enabled) enabled_.insert(peer);
  if (access != runtime::PeerAccess::none) {
    const std::optional<bool> right = arrives(peer);
    if (!right.value_or(false)) go_through_the_host(peer, right.has_value());
  }
  reached_.insert(peer);
}

/// Whether a pattern arrives as it was sent; nothing where a card has no memory for it.
std::optional<bool> CudaPeers::arrives(int peer) const {
  const std::vector<std::byte> sent = pattern();
  std::vector<std::byte> received(sent.size());
  const Side from(peer);
  const Side to(ordinal_);
  if (!from.there() || !to.there()) return std::nullopt;
  {
    const runtime::CurrentDevice current(peer);
    runtime::copy(from.data(), sent.data(), sent.size(), CopyKind::host_to_device, from.stream());
    from.wait();
  }
  runtime::fill(to.data(), 0, sent.size(), to.stream());
  runtime::copy_peer(to.data(), ordinal_, from.data(), peer, sent.size(), to.stream());
  runtime::copy(received.data(), to.data(), sent.size(), CopyKind::device_to_host, to.stream());
  to.wait();
  return received == sent;
}

/// Sends copies from `peer` through the host, as the driver does without access. `tried`: straight ones have arrived
/// changed.
void CudaPeers::go_through_the_host(int peer, bool tried) {
  const auto refuse = [&](const char* why) {
    throw runtime::RuntimeError(fmt::format("copies from cuda:{} to cuda:{} cannot be used", peer, ordinal_), why,
                                false);
  };
  if (!enabled_.contains(peer)) {
    refuse(tried ? "they arrive changed, and another library of this process has enabled them"
                 : "no memory is left to try them");
  }
  runtime::disable_peer(peer);
  enabled_.erase(peer);
  if (!arrives(peer).value_or(!tried)) refuse("they arrive changed, also through the host");
  if (!slower_ || std::exchange(told_, true)) return;
  slower_(fmt::format("copies from cuda:{} straight to cuda:{} {}: they go through the host, which is slower", peer,
                      ordinal_, tried ? "arrive changed" : "cannot be tried for want of memory"));
}

}  // namespace tandem
