#include "comm/process_group.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "comm/group_call.hpp"
#include "core/base/error.hpp"

namespace tandem {
namespace {

/// Time for the rendezvous to tell which rank has ended, when a transport has seen a connection end first.
constexpr std::chrono::milliseconds until_named(2000);

class ProcessGroup final : public Group {
 public:
  ProcessGroup(std::shared_ptr<Rendezvous> rendezvous, std::unique_ptr<PeerTransport> transport, Device& device)
      : rendezvous_(std::move(rendezvous)), transport_(std::move(transport)), device_(device) {
    rendezvous_->when_broken([this] { transport_->stop(); });
  }
  ~ProcessGroup() override {
    ProcessGroup::leave();
    rendezvous_->when_broken(nullptr);
  }
  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;

  Rank rank() const noexcept override { return rendezvous_->rank(); }
  void all_gather(std::byte* buffer, std::span<const ByteRange> parts, StreamView stream) override;
  void all_to_all(const std::byte* from, std::span<const ByteRange> parts, std::byte* to, StreamView stream) override;
  void broadcast(Channel channel, int root, std::span<std::byte> bytes) override;
  void send(Channel channel, int from, int to, std::span<std::byte> bytes) override;
  void fail(std::exception_ptr error) noexcept override { rendezvous_->fail(error); }
  void leave() noexcept override;

 private:
  template <class Body>
  void or_fail(const Body& body);
  template <class Check, class Body>
  void move(std::string_view name, std::span<const ByteRange> parts, StreamView stream, const Check& check,
            const Body& body);
  void carry(Channel channel, const std::string& call, int from, Rendezvous::Receiver to, std::span<std::byte> bytes);
  void require_memory(const std::byte* data, ByteRange part, std::string_view action) const;
  std::exception_ptr cause() const;

  const std::shared_ptr<Rendezvous> rendezvous_;
  const std::unique_ptr<PeerTransport> transport_;
  Device& device_;
};

/// Runs `body`; an exception of it ends the calls of the other ranks, who would wait for this one, and is rethrown.
template <class Body>
void ProcessGroup::or_fail(const Body& body) {
  try {
    body();
  } catch (...) {
    fail(std::current_exception());
    throw;
  }
}

/// Runs `check` before the ranks meet, so that its errors are told to all of them before anything moves.
template <class Check, class Body>
void ProcessGroup::move(std::string_view name, std::span<const ByteRange> parts, StreamView stream, const Check& check,
                        const Body& body) {
  or_fail([&] {
    device_.require_own(stream);
    require_parts(parts, rank().count);
    if (rank().count > 1 && !rendezvous_->failure()) check();
    rendezvous_->meet(Rendezvous::of_devices, text_of_call(name, parts), "");
    try {
      body();
    } catch (const PeerError&) {
      if (const std::exception_ptr named = cause()) std::rethrow_exception(named);
      throw;
    }
  });
}

void ProcessGroup::require_memory(const std::byte* data, ByteRange part, std::string_view action) const {
  if (part.size() > 0) transport_->require_memory(data + part.begin, part.size(), action);
}

void ProcessGroup::all_gather(std::byte* buffer, std::span<const ByteRange> parts, StreamView stream) {
  const auto check = [&] {
    for (const ByteRange part : parts) require_memory(buffer, part, "copy between ranks uses");
  };
  move("all_gather", parts, stream, check, [&] { transport_->all_gather(buffer, parts, stream); });
}

void ProcessGroup::all_to_all(const std::byte* from, std::span<const ByteRange> parts, std::byte* to,
                              StreamView stream) {
  const auto own = static_cast<std::size_t>(rank().index);
  const auto check = [&] {
    for (std::size_t peer = 0; peer < parts.size(); ++peer) {
      if (peer != own) require_memory(from, parts[peer], "copy between ranks reads");
    }
    require_memory(to, {0, parts[own].size() * (parts.size() - 1)}, "copy between ranks writes");
  };
  move("all_to_all", parts, stream, check, [&] { transport_->all_to_all(from, parts, to, stream); });
}

// First, since others learn by it that they may free what they have shown.
void ProcessGroup::leave() noexcept {
  transport_->drain();
  rendezvous_->leave();
}

/// Error that has ended the group, once a transport has seen another rank's end; null where none is told of.
std::exception_ptr ProcessGroup::cause() const {
  const auto limit = std::chrono::steady_clock::now() + until_named;
  while (!rendezvous_->failure() && std::chrono::steady_clock::now() < limit) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return rendezvous_->failure();
}

void ProcessGroup::broadcast(Channel channel, int root, std::span<std::byte> bytes) {
  or_fail([&] {
    require_rank(root, rank().count, "broadcast");
    carry(channel, text_of_broadcast(root, bytes.size()), root, std::nullopt, bytes);
  });
}

void ProcessGroup::send(Channel channel, int from, int to, std::span<std::byte> bytes) {
  or_fail([&] {
    require_rank(from, rank().count, "send");
    require_rank(to, rank().count, "send to");
    const std::string call = text_of_send(from, to, bytes.size());
    carry(channel, call, from, to, from == to ? bytes.first(0) : bytes);
  });
}

/// Carries bytes of rank `from` to rank `to`, or to all, in meetings of at most value_limit bytes.
void ProcessGroup::carry(Channel channel, const std::string& call, int from, Rendezvous::Receiver to,
                         std::span<std::byte> bytes) {
  const bool receives = !to || *to == rank().index;
  std::size_t done = 0;
  do {
    const std::size_t size = std::min(value_limit, bytes.size() - done);
    std::string value;
    if (rank().index == from) value.assign(reinterpret_cast<const char*>(bytes.data()) + done, size);
    const auto values = rendezvous_->meet(static_cast<std::size_t>(channel), call, std::move(value), to);
    const std::string& sent = values[static_cast<std::size_t>(from)];
    if (sent.size() != (receives ? size : 0)) throw DeviceError("ranks were brought another number of bytes than sent");
    if (!sent.empty()) std::memcpy(bytes.data() + done, sent.data(), sent.size());
    done += size;
  } while (done < bytes.size());
}

}  // namespace

std::unique_ptr<Group> make_process_group(std::shared_ptr<Rendezvous> rendezvous,
                                          std::unique_ptr<PeerTransport> transport, Device& device) {
  return std::make_unique<ProcessGroup>(std::move(rendezvous), std::move(transport), device);
}

}  // namespace tandem
