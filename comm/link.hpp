#pragma once
// A TCP connection that carries messages between rank 0 and another process.
#include <array>
#include <boost/asio/ip/tcp.hpp>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>

#include "comm/wire.hpp"
#include "core/base/error.hpp"

namespace tandem {

/// Sends and receives messages, in order, on the one thread that runs its context; every method is called there.
/// Whatever the other side sends, a link has one message of it in memory, at most as long as its limit. Its handlers
/// keep it alive until it is closed.
class Link : public std::enable_shared_from_this<Link> {
 public:
  using OnMessage = std::function<void(Message)>;
  /// Called once, with the reason in words, when the other side has closed or broken the connection, or sent what is no
  /// message. Not called after `close`.
  using OnEnd = std::function<void(const std::string& reason)>;

  Link(boost::asio::ip::tcp::socket socket, std::size_t limit_bytes);
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  /// Begins to receive, with the handlers set before.
  void start() { receive_length(); }
  /// Sets the handlers and the limit of the messages to come. A handler may replace itself so.
  void handle(OnMessage on_message, OnEnd on_end, std::size_t limit_bytes);

  void send(const Message& message);
  /// Ends this side once all is sent. The other side is read until it ends too, which is when OnEnd is called.
  void finish();
  /// Closes at once, and drops the handlers.
  void close() noexcept;

  /// Address and port of the other side.
  const std::string& peer() const noexcept { return peer_; }
  /// Address of this side, in numbers.
  std::string local_address() const;
  std::chrono::steady_clock::time_point last_heard() const noexcept { return last_heard_; }

 private:
  void receive_length();
  void receive_body(std::size_t bytes);
  void received();
  void send_next();
  void end(const std::string& reason);

  boost::asio::ip::tcp::socket socket_;
  std::size_t limit_;
  const std::string peer_;
  OnMessage on_message_;
  OnEnd on_end_;
  std::array<std::uint8_t, length_bytes> length_{};
  std::string body_;
  std::deque<std::string> unsent_;
  bool finishing_ = false;
  bool closed_ = false;
  std::chrono::steady_clock::time_point last_heard_ = std::chrono::steady_clock::now();
};

/// "10.0.0.1:29400", "[::1]:29400".
std::string text_of(const boost::asio::ip::tcp::endpoint& endpoint);
/// Error of a rank that is told an address of rank 0 by a name which stands for none.
UsageError no_such_address(int rank, const std::string& host, const boost::system::error_code& why);

}  // namespace tandem
