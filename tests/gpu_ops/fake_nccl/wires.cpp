#include "tests/gpu_ops/fake_nccl/wires.hpp"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

namespace tandem::fake_nccl {
namespace {

constexpr std::chrono::microseconds between_tries(200);

/// A name without a file: gone with its socket.
sockaddr_un address_of(const std::string& name, socklen_t& length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(&address.sun_path[1], name.data(), name.size());
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

int new_socket() { return ::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); }

/// -1 only where the other side is gone.
std::ptrdiff_t moved(ssize_t result) {
  if (result > 0) return result;
  return result < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) ? 0 : -1;
}

/// Calls `some(done)` until `bytes` have been moved.
template <class Some>
bool move_all(std::size_t bytes, const Wires::Ended& ended, const Some& some) {
  for (std::size_t done = 0; done < bytes;) {
    const std::ptrdiff_t now = moved(some(done));
    if (now < 0 || ended()) return false;
    if (now == 0) std::this_thread::sleep_for(between_tries);
    done += static_cast<std::size_t>(now);
  }
  return true;
}

}  // namespace

Wires::Wires(const std::string& id, Place own, int count)
    : id_(id), own_(own), sockets_(static_cast<std::size_t>(count), -1), places_(static_cast<std::size_t>(count)) {
  places_[static_cast<std::size_t>(own.rank)] = own;
  listening_ = new_socket();
  socklen_t length = 0;
  const sockaddr_un address = address_of(name_of(own.rank), length);
  const bool listens =
      ::bind(listening_, reinterpret_cast<const sockaddr*>(&address), length) == 0 && ::listen(listening_, count) == 0;
  if (listens) return;
  ::close(listening_);
  listening_ = -1;
}

Wires::~Wires() {
  for (const int socket : sockets_) {
    if (socket >= 0) ::close(socket);
  }
  if (listening_ >= 0) ::close(listening_);
}

std::string Wires::name_of(int rank) const { return "tandem-fake-nccl-" + id_ + "-" + std::to_string(rank); }

bool Wires::connect(const Ended& ended) {
  if (listening_ < 0) return false;
  for (int peer = 0; peer < own_.rank; ++peer) {
    if (!connect_to(peer, ended)) return false;
  }
  for (std::size_t peer = static_cast<std::size_t>(own_.rank) + 1; peer < sockets_.size(); ++peer) {
    if (!accept_one(ended)) return false;
  }
  return true;
}

bool Wires::connect_to(int peer, const Ended& ended) {
  socklen_t length = 0;
  const sockaddr_un address = address_of(name_of(peer), length);
  for (; !ended(); std::this_thread::sleep_for(between_tries)) {
    const int socket = new_socket();
    if (::connect(socket, reinterpret_cast<const sockaddr*>(&address), length) == 0) return greet(socket, ended);
    ::close(socket);
  }
  return false;
}

bool Wires::accept_one(const Ended& ended) {
  for (; !ended(); std::this_thread::sleep_for(between_tries)) {
    const int socket = ::accept4(listening_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (socket >= 0) return greet(socket, ended);
  }
  return false;
}

/// Each side says where it is.
bool Wires::greet(int socket, const Ended& ended) {
  Place theirs;
  const auto* own = reinterpret_cast<const char*>(&own_);
  auto* other = reinterpret_cast<char*>(&theirs);
  const bool greeted =
      move_all(sizeof own_, ended,
               [&](std::size_t done) { return ::send(socket, own + done, sizeof own_ - done, MSG_NOSIGNAL); }) &&
      move_all(sizeof theirs, ended,
               [&](std::size_t done) { return ::recv(socket, other + done, sizeof theirs - done, 0); });
  if (!greeted) {
    ::close(socket);
    return false;
  }
  sockets_.at(static_cast<std::size_t>(theirs.rank)) = socket;
  places_.at(static_cast<std::size_t>(theirs.rank)) = theirs;
  return true;
}

bool Wires::share_cards() const {
  for (std::size_t one = 0; one < places_.size(); ++one) {
    for (std::size_t other = 0; other < one; ++other) {
      if (places_[one].process == places_[other].process && places_[one].card == places_[other].card) return true;
    }
  }
  return false;
}

std::ptrdiff_t Wires::send_some(int peer, const std::byte* data, std::size_t bytes) const {
  return moved(::send(sockets_[static_cast<std::size_t>(peer)], data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT));
}

std::ptrdiff_t Wires::receive_some(int peer, std::byte* data, std::size_t bytes) const {
  return moved(::recv(sockets_[static_cast<std::size_t>(peer)], data, bytes, MSG_DONTWAIT));
}

bool Wires::has_more(int peer) const {
  std::byte next{};
  const int socket = sockets_[static_cast<std::size_t>(peer)];
  return socket >= 0 && ::recv(socket, &next, 1, MSG_PEEK | MSG_DONTWAIT) > 0;
}

}  // namespace tandem::fake_nccl
