#include "comm/gloo_transport.hpp"

#include <fmt/format.h>
#include <gloo/common/error.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "comm/proof.hpp"
#include "core/base/error.hpp"
#include "core/base/stall.hpp"
#include "core/base/trace.hpp"
#include "core/device/watched_wait.hpp"

namespace tandem {
namespace {

constexpr std::size_t chunk = gloo_staging_bytes / 2;  // bytes each way at once
constexpr int tries = 5;                               // to connect, where others connect to Gloo's ports first
constexpr std::chrono::seconds word_limit(6);          // for a rank's first word over a connection

/// Gloo waits five times as long, and nothing ends that: a rank that is killed meanwhile is to be missed within
/// seconds. Later tries are for slower networks.
constexpr std::chrono::milliseconds connecting_limit(int number) { return std::chrono::milliseconds(400 << number); }

/// Keys and values of all ranks. All set theirs in the same order, so that each is a meeting.
class MeetingStore final : public gloo::rendezvous::Store {
 public:
  explicit MeetingStore(Rendezvous& rendezvous) : rendezvous_(rendezvous) {}

  void set(const std::string& key, const std::vector<char>& data) override {
    const std::string value = key + '\0' + std::string(data.begin(), data.end());
    for (const std::string& each : rendezvous_.meet(Rendezvous::of_others, "addresses of gloo", value)) {
      const std::size_t end = each.find('\0');
      if (end == each.npos) throw DeviceError("a rank brought no address");
      values_[each.substr(0, end)] = std::vector<char>(each.begin() + static_cast<std::ptrdiff_t>(end) + 1, each.end());
    }
  }
  std::vector<char> get(const std::string& key) override { return values_.at(key); }
  void wait(const std::vector<std::string>& keys) override {
    for (const std::string& key : keys) {
      if (!values_.contains(key)) throw DeviceError(fmt::format("gloo asks for '{}', which no rank has set", key));
    }
  }

 private:
  Rendezvous& rendezvous_;
  std::map<std::string, std::vector<char>> values_;
};

/// Gloo writes to connections that may have ended: a process that this signal ends, as by default, is to see an error.
void ignore_broken_pipes() {
  struct sigaction now {};
  if (::sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_DFL) std::signal(SIGPIPE, SIG_IGN);
}

/// Connects all ranks. Versions of Gloo from 2023 on share the store.
template <class Context, class Device>
void connect_all(Context& context, const std::shared_ptr<MeetingStore>& store, Device& device) {
  if constexpr (requires { context.connectFullMesh(*store, device); }) {
    context.connectFullMesh(*store, device);
  } else {
    context.connectFullMesh(store, device);
  }
}

/// Range of bytes that one rank sends to, or receives from, another in a call.
struct Piece {
  std::byte* data = nullptr;
  std::size_t size = 0;
  /// Bytes from `done` on that are next.
  std::size_t next(std::size_t done) const noexcept { return std::min(chunk, size - std::min(size, done)); }
};

class GlooTransport final : public PeerTransport {
 public:
  GlooTransport(Rendezvous& rendezvous, Device& device, double watchdog_seconds);

  void all_gather(std::byte* buffer, std::span<const ByteRange> parts, StreamView stream) override;
  void all_to_all(const std::byte* from, std::span<const ByteRange> parts, std::byte* to, StreamView stream) override;
  void stop() noexcept override;

 private:
  struct Call {
    std::string_view name;
    StreamView stream;
    std::chrono::milliseconds limit;
  };

  std::string try_to_connect(Rendezvous& rendezvous, const std::vector<std::string>& words,
                             std::chrono::milliseconds limit);
  void use(std::shared_ptr<gloo::rendezvous::Context> context);
  void check_peers(const std::vector<std::string>& words);
  template <class Pieces>
  void among_all(const Call& call, const Pieces& pieces);
  void exchange(const Call& call, int to, const Piece& sent, int from, const Piece& received);
  void require_going() const;
  template <class Done>
  void wait(const Call& call, int rank, const Done& done);
  void wait_for_send(const Call& call, int rank);
  void wait_for_receive(const Call& call, int rank);
  void wait_for_stream(const Call& call);
  void come_to_rest(const Call& call) noexcept;
  std::byte* sending() const noexcept { return static_cast<std::byte*>(staging_.data()); }
  std::byte* receiving() const noexcept { return sending() + chunk; }

  const Rank rank_;
  Device& device_;
  const double watchdog_seconds_;
  const std::chrono::milliseconds limit_;
  MemoryBlock staging_;  ///< outlives Gloo's buffers
  std::mutex mutex_;     ///< for whoever stops, while buffers are replaced
  std::shared_ptr<gloo::rendezvous::Context> context_;
  std::unique_ptr<gloo::transport::UnboundBuffer> send_;
  std::unique_ptr<gloo::transport::UnboundBuffer> receive_;
  std::uint64_t calls_ = 0;  ///< the number of a call tells its messages from those of others
  std::atomic<bool> stopped_{false};
};

GlooTransport::GlooTransport(Rendezvous& rendezvous, Device& device, double watchdog_seconds)
    : rank_(rendezvous.rank()),
      device_(device),
      watchdog_seconds_(watchdog_seconds),
      limit_(std::max<std::int64_t>(1, static_cast<std::int64_t>(watchdog_seconds * 1000))) {
  if (rank_.count == 1) return;
  staging_ = device.allocate_pinned(gloo_staging_bytes, "gloo staging");
  const StopWhenBroken stopping(rendezvous, *this);
  const std::vector<std::string> words = rendezvous.meet(Rendezvous::of_others, "words of ranks", random_nonce());
  for (int number = 0; number < tries; ++number) {
    const std::string error = try_to_connect(rendezvous, words, connecting_limit(number));
    const auto errors = rendezvous.meet(Rendezvous::of_others, "connections of ranks", error);
    const auto failed = std::ranges::find_if(errors, [](const std::string& each) { return !each.empty(); });
    if (failed == errors.end()) return;
    use(nullptr);
    if (number + 1 < tries) continue;
    throw DeviceError(
        fmt::format("rank {} at {} cannot connect with the other ranks", failed - errors.begin(), rendezvous.address()),
        *failed, "let the machines of a launch reach each other by TCP at any port, and nobody else");
  }
}

/// Connects all ranks, which do so at once. Returns why it could not be; empty where it is done.
std::string GlooTransport::try_to_connect(Rendezvous& rendezvous, const std::vector<std::string>& words,
                                          std::chrono::milliseconds limit) {
  constexpr std::size_t longest = 500;
  try {
    gloo::transport::tcp::attr attributes(rendezvous.address().c_str());
    auto device = gloo::transport::tcp::CreateDevice(attributes);
    auto context = std::make_shared<gloo::rendezvous::Context>(rank_.index, rank_.count);
    context->setTimeout(limit);
    connect_all(*context, std::make_shared<MeetingStore>(rendezvous), device);
    use(std::move(context));
    check_peers(words);
  } catch (const gloo::Exception& error) {
    return std::string(error.what()).substr(0, longest);
  } catch (const PeerError& error) {
    if (const std::exception_ptr failure = rendezvous.failure()) std::rethrow_exception(failure);
    return std::string(error.what()).substr(0, longest);
  }
  return "";
}

void GlooTransport::use(std::shared_ptr<gloo::rendezvous::Context> context) {
  const std::lock_guard lock(mutex_);
  send_ = context ? context->createUnboundBuffer(sending(), chunk) : nullptr;
  receive_ = context ? context->createUnboundBuffer(receiving(), chunk) : nullptr;
  context_ = std::move(context);
}

/// Gloo takes whoever connects first: each rank says over each connection the word that it has said at the rendezvous.
void GlooTransport::check_peers(const std::vector<std::string>& words) {
  const std::string& own = words[static_cast<std::size_t>(rank_.index)];
  // Other ranks may come here later by the time that connecting takes; a stranger in their place says nothing at all.
  const Call call{.name = "connecting", .stream = {}, .limit = word_limit};
  std::copy_n(reinterpret_cast<const std::byte*>(own.data()), own.size(), sending());
  for (int distance = 1; distance < rank_.count; ++distance) {
    const int to = (rank_.index + distance) % rank_.count;
    const int from = (rank_.index - distance + rank_.count) % rank_.count;
    send_->send(to, calls_, 0, own.size());
    receive_->recv(from, calls_, 0, own.size());
    wait_for_send(call, to);
    wait_for_receive(call, from);
    const std::string said(reinterpret_cast<const char*>(receiving()), own.size());
    if (!same_proof(said, words[static_cast<std::size_t>(from)])) {
      throw PeerError(fmt::format("another program is connected in the place of rank {}", from));
    }
  }
}

void GlooTransport::stop() noexcept {
  stopped_ = true;
  try {
    const std::lock_guard lock(mutex_);
    if (send_) send_->abortWaitSend();
    if (receive_) receive_->abortWaitRecv();
  } catch (...) {  // locks alone
  }
}

void GlooTransport::require_going() const {
  if (stopped_) throw PeerError("the ranks' connections are no longer used");
}

void GlooTransport::wait_for_send(const Call& call, int rank) {
  wait(call, rank, [&] { return send_->waitSend(call.limit); });
}

void GlooTransport::wait_for_receive(const Call& call, int rank) {
  wait(call, rank, [&] { return receive_->waitRecv(call.limit); });
}

/// Calls `done`, which waits for a copy from or to `rank`, and throws where it says false. Gloo closes all connections
/// when a wait is over its time, and throws.
template <class Done>
void GlooTransport::wait(const Call& call, int rank, const Done& done) {
  require_going();
  const double begin = trace_now();
  try {
    if (!done()) throw PeerError(fmt::format("{} with rank {} was ended", call.name, rank));
  } catch (const gloo::Exception&) {
    const double seconds = trace_now() - begin;
    if (seconds < watchdog_seconds_) throw;
    const StalledError error =
        stalled(fmt::format("{} of the group", call.name), seconds, fmt::format("rank {}", rank));
    report_stall(error);
    throw error;
  }
}

void GlooTransport::wait_for_stream(const Call& call) {
  wait_or_give_up(device_, call.stream, {.what = call.name, .limit_seconds = watchdog_seconds_});
}

// The call throws what it failed by: whatever the stream may say is no news.
void GlooTransport::come_to_rest(const Call& call) noexcept {
  try {
    wait_for_stream(call);
  } catch (...) {
  }
}

/// Sends and receives chunk by chunk, through the staging memory.
void GlooTransport::exchange(const Call& call, int to, const Piece& sent, int from, const Piece& received) {
  for (std::size_t done = 0; done < std::max(sent.size, received.size); done += chunk) {
    const std::size_t out = sent.next(done);
    const std::size_t in = received.next(done);
    if (out > 0) device_.copy(sending(), sent.data + done, out, CopyKind::device_to_host, call.stream);
    wait_for_stream(call);  // also for what was received last
    if (out > 0) send_->send(to, calls_, 0, out);
    if (in > 0) receive_->recv(from, calls_, 0, in);
    if (out > 0) wait_for_send(call, to);
    if (in > 0) wait_for_receive(call, from);
    if (in > 0) device_.copy(received.data + done, receiving(), in, CopyKind::host_to_device, call.stream);
  }
  wait_for_stream(call);
}

/// Gives each rank and takes from each: `pieces(to, from)` are what is sent and received. In the step of each distance
/// all ranks send to one and receive from another.
template <class Pieces>
void GlooTransport::among_all(const Call& call, const Pieces& pieces) {
  require_going();
  ++calls_;
  try {
    wait_for_stream(call);
    for (int distance = 1; distance < rank_.count; ++distance) {
      const int to = (rank_.index + distance) % rank_.count;
      const int from = (rank_.index - distance + rank_.count) % rank_.count;
      const auto [sent, received] = pieces(to, from);
      exchange(call, to, sent, from, received);
    }
  } catch (const gloo::Exception& error) {
    stop();
    come_to_rest(call);
    throw PeerError(fmt::format("{} between ranks failed", call.name), error.what());
  } catch (...) {
    stop();
    come_to_rest(call);
    throw;
  }
}

void GlooTransport::all_gather(std::byte* buffer, std::span<const ByteRange> parts, StreamView stream) {
  const auto piece_of = [&](int rank) {
    const ByteRange part = parts[static_cast<std::size_t>(rank)];
    return Piece{buffer + part.begin, part.size()};
  };
  among_all({.name = "all_gather", .stream = stream, .limit = limit_},
            [&](int, int from) { return std::pair(piece_of(rank_.index), piece_of(from)); });
}

void GlooTransport::all_to_all(const std::byte* from, std::span<const ByteRange> parts, std::byte* to,
                               StreamView stream) {
  among_all({.name = "all_to_all", .stream = stream, .limit = limit_}, [&](int receiver, int sender) {
    const ByteRange given = parts[static_cast<std::size_t>(receiver)];
    const std::size_t taken = parts[static_cast<std::size_t>(rank_.index)].size();
    const auto slot = static_cast<std::size_t>(sender < rank_.index ? sender : sender - 1);
    // Only read from.
    return std::pair(Piece{const_cast<std::byte*>(from) + given.begin, given.size()}, Piece{to + slot * taken, taken});
  });
}

}  // namespace

std::unique_ptr<PeerTransport> make_gloo_transport(Rendezvous& rendezvous, Device& device, double watchdog_seconds) {
  ignore_broken_pipes();
  return std::make_unique<GlooTransport>(rendezvous, device, watchdog_seconds);
}

}  // namespace tandem
