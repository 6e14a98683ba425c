#pragma once
// A port of this machine whose connections are those to another port, and the bytes that pass.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <thread>
#include <vector>

namespace tandem::testing {

/// Passes bytes on until it goes, by two threads for each connection.
class Relay {
 public:
  Relay() : listener_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address = loopback(0);
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    socklen_t size = sizeof address;
    if (listener_ < 0 || ::bind(listener_, any, size) != 0 || ::listen(listener_, 16) != 0 ||
        ::getsockname(listener_, any, &size) != 0) {
      throw std::runtime_error("no port for a relay");
    }
    port_ = ntohs(address.sin_port);
  }
  ~Relay() {
    ::shutdown(listener_, SHUT_RDWR);
    if (accepts_.joinable()) accepts_.join();
    for (const int end : ends_) ::shutdown(end, SHUT_RDWR);
    for (std::thread& thread : passes_) thread.join();
    for (const int end : ends_) ::close(end);
    ::close(listener_);
  }
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  int port() const noexcept { return port_; }
  /// Begins to take connections.
  void pass_on_to(int port) {
    accepts_ = std::thread([this, port] {
      for (int from = -1; (from = ::accept(listener_, nullptr, nullptr)) >= 0;) connect(from, port);
    });
  }
  /// Bytes that have gone to the other port, and that have come from there.
  std::uint64_t bytes_there() const noexcept { return there_; }
  std::uint64_t bytes_back() const noexcept { return back_; }

 private:
  static sockaddr_in loopback(int port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    return address;
  }
  void connect(int from, int port) {
    const int to = ::socket(AF_INET, SOCK_STREAM, 0);
    const sockaddr_in address = loopback(port);
    ends_.push_back(from);
    ends_.push_back(to);
    if (::connect(to, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
      ::shutdown(from, SHUT_RDWR);
      return;
    }
    passes_.emplace_back([this, from, to] { pass(from, to, there_); });
    passes_.emplace_back([this, from, to] { pass(to, from, back_); });
  }
  static void pass(int from, int to, std::atomic<std::uint64_t>& count) {
    std::array<char, 1 << 16> bytes{};
    for (ssize_t size = 0; (size = ::recv(from, bytes.data(), bytes.size(), 0)) > 0;) {
      count += static_cast<std::uint64_t>(size);
      for (ssize_t sent = 0; sent < size;) {
        const ssize_t now = ::send(to, bytes.data() + sent, static_cast<std::size_t>(size - sent), MSG_NOSIGNAL);
        if (now <= 0) return void(::shutdown(from, SHUT_RDWR));
        sent += now;
      }
    }
    ::shutdown(to, SHUT_WR);
  }

  int listener_;
  int port_ = 0;
  std::atomic<std::uint64_t> there_{0};
  std::atomic<std::uint64_t> back_{0};
  std::vector<int> ends_;            ///< sockets of the thread that accepts, until it has ended
  std::vector<std::thread> passes_;  ///< threads that pass bytes on; kept by the thread that accepts
  std::thread accepts_;
};

}  // namespace tandem::testing
