#include "comm/link.hpp"

#include <fmt/format.h>

#include <boost/asio/buffer.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/write.hpp>
#include <utility>

namespace tandem {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

std::string text_of(const tcp::endpoint& endpoint) {
  const std::string host = endpoint.address().to_string();
  if (endpoint.address().is_v6()) return fmt::format("[{}]:{}", host, endpoint.port());
  return fmt::format("{}:{}", host, endpoint.port());
}

UsageError no_such_address(int rank, const std::string& host, const error_code& why) {
  return UsageError(fmt::format("rank {}: MASTER_ADDR '{}' stands for no address", rank, host), why.message(),
                    "set it to the name or number of an address of rank 0's machine");
}

namespace {

std::string peer_of(const tcp::socket& socket) {
  error_code error;
  const tcp::endpoint endpoint = socket.remote_endpoint(error);
  return error ? "an address that is gone" : text_of(endpoint);
}

std::string reason_of(const error_code& error) {
  if (error == asio::error::eof || error == asio::error::connection_reset || error == asio::error::broken_pipe) {
    return "its connection ended";
  }
  return error.message();
}

}  // namespace

Link::Link(tcp::socket socket, std::size_t limit_bytes)
    : socket_(std::move(socket)), limit_(limit_bytes), peer_(peer_of(socket_)) {
  error_code ignored;  // a connection that is gone says so when it is read
  socket_.set_option(tcp::no_delay(true), ignored);
}

std::string Link::local_address() const {
  error_code error;
  const tcp::endpoint endpoint = socket_.local_endpoint(error);
  return error ? "" : endpoint.address().to_string();
}

void Link::handle(OnMessage on_message, OnEnd on_end, std::size_t limit_bytes) {
  on_message_ = std::move(on_message);
  on_end_ = std::move(on_end);
  limit_ = limit_bytes;
}

void Link::receive_length() {
  asio::async_read(socket_, asio::buffer(length_), [self = shared_from_this()](const error_code& error, std::size_t) {
    if (error) return self->end(reason_of(error));
    const std::size_t bytes = decode_length(self->length_);
    if (bytes > self->limit_) return self->end("it sent what is no message");
    self->receive_body(bytes);
  });
}

void Link::receive_body(std::size_t bytes) {
  body_.resize(bytes);
  asio::async_read(socket_, asio::buffer(body_), [self = shared_from_this()](const error_code& error, std::size_t) {
    if (error) return self->end(reason_of(error));
    self->received();
  });
}

void Link::received() {
  if (closed_) return;
  last_heard_ = std::chrono::steady_clock::now();
  std::optional<Message> message = decode(body_);
  body_ = std::string();  // also its memory
  if (!message) return end("it sent what is no message");
  const OnMessage handler = on_message_;  // copied: the handler may replace on_message_
  handler(std::move(*message));
  if (!closed_) receive_length();
}

void Link::send(const Message& message) {
  if (closed_ || finishing_) return;
  unsent_.push_back(encode(message));
  if (unsent_.size() == 1) send_next();
}

void Link::send_next() {
  asio::async_write(socket_, asio::buffer(unsent_.front()),
                    [self = shared_from_this()](const error_code& error, std::size_t) {
                      if (self->closed_) return;
                      // Reading tells of the end, after all that the other side had still to say.
                      self->unsent_.pop_front();
                      if (error) self->unsent_.clear();
                      if (!self->unsent_.empty()) return self->send_next();
                      if (self->finishing_) self->finish();
                    });
}

void Link::finish() {
  finishing_ = true;
  if (closed_ || !unsent_.empty()) return;
  error_code ignored;
  socket_.shutdown(tcp::socket::shutdown_send, ignored);
}

void Link::end(const std::string& reason) {
  if (closed_) return;
  const OnEnd handler = std::move(on_end_);
  close();
  if (handler) handler(reason);
}

void Link::close() noexcept {
  closed_ = true;
  on_message_ = nullptr;
  on_end_ = nullptr;
  error_code ignored;
  socket_.close(ignored);
}

}  // namespace tandem
