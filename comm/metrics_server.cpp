#include "comm/metrics_server.hpp"

#include <fmt/format.h>

#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <chrono>
#include <cstdint>
#include <limits>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/start_thread.hpp"

namespace tandem {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using asio::ip::tcp;
using boost::system::error_code;

constexpr std::uint32_t header_limit = 8192;  // bytes
constexpr std::size_t buffer_limit = 16384;

/// The text of the moment, shared with every answer under way.
class Page {
 public:
  void set(std::string text) {
    auto fresh = std::make_shared<const std::string>(std::move(text));
    const std::lock_guard lock(mutex_);
    text_.swap(fresh);
  }
  std::shared_ptr<const std::string> get() const {
    const std::lock_guard lock(mutex_);
    return text_;
  }

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<const std::string> text_ = std::make_shared<const std::string>();
};

http::response<http::string_body> answer(http::verb method, beast::string_view target, const Page& page) {
  http::response<http::string_body> response;
  response.version(11);
  response.keep_alive(false);
  const auto path = target.substr(0, target.find('?'));
  if (method != http::verb::get && method != http::verb::head) {
    response.result(http::status::method_not_allowed);
    response.set(http::field::allow, "GET, HEAD");
  } else if (path != "/metrics") {
    response.result(http::status::not_found);
    response.set(http::field::content_type, "text/plain");
    response.body() = "metrics are at /metrics\n";
  } else {
    response.set(http::field::content_type, "text/plain; version=0.0.4; charset=utf-8");
    response.body() = *page.get();
  }
  response.prepare_payload();
  if (method == http::verb::head) response.body().clear();
  return response;
}

/// One connection, one request, one answer; it keeps itself alive until then.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(tcp::socket socket, const Page& page, std::shared_ptr<int> open, std::chrono::duration<double> time)
      : stream_(std::move(socket)), page_(page), open_(std::move(open)) {
    ++*open_;
    parser_.header_limit(header_limit);
    parser_.body_limit(std::numeric_limits<std::uint64_t>::max());  // bodies are dropped, whatever their length
    stream_.expires_after(std::chrono::duration_cast<std::chrono::milliseconds>(time));
  }
  ~Connection() { --*open_; }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void start() {
    http::async_read_header(stream_, buffer_, parser_, [self = shared_from_this()](error_code error, std::size_t) {
      if (!error) self->reply();
    });
  }

 private:
  void reply() {
    response_ = answer(parser_.get().method(), parser_.get().target(), page_);
    http::async_write(stream_, *response_, [self = shared_from_this()](error_code, std::size_t) {
      error_code ignored;
      self->stream_.socket().shutdown(tcp::socket::shutdown_send, ignored);
      if (!self->parser_.is_done()) self->drop_body();
    });
  }

  /// Reads until the client has closed, or its time is over: closing on what nobody has read resets the connection, and
  /// the client loses its answer.
  void drop_body() {
    buffer_.clear();
    stream_.async_read_some(buffer_.prepare(buffer_limit), [self = shared_from_this()](error_code error, std::size_t) {
      if (!error) self->drop_body();
    });
  }

  beast::tcp_stream stream_;
  const Page& page_;
  std::shared_ptr<int> open_;
  beast::flat_buffer buffer_{buffer_limit};
  http::request_parser<http::empty_body> parser_;
  std::optional<http::response<http::string_body>> response_;
};

asio::ip::address numeric(const std::string& address) {
  error_code error;
  auto parsed = asio::ip::make_address(address, error);
  if (!error) return parsed;
  throw UsageError(fmt::format("--metrics-address {}", address), "not a numeric address", "for example 127.0.0.1");
}

}  // namespace

struct MetricsServer::Impl {
  explicit Impl(const MetricsServerOptions& o) : options(o) {}

  void listen(const std::string& address, int port) {
    const tcp::endpoint endpoint(numeric(address), static_cast<unsigned short>(port));
    error_code error;
    acceptor.open(endpoint.protocol(), error);
    if (!error) acceptor.set_option(tcp::acceptor::reuse_address(true), error);
    if (!error) acceptor.bind(endpoint, error);
    if (!error) acceptor.listen(asio::socket_base::max_listen_connections, error);
    if (error) {
      throw DeviceError(fmt::format("--metrics-port {}", port), error.message(),
                        "use another port, or 0 for a free one");
    }
    at = acceptor.local_endpoint();
  }

  void accept() {
    acceptor.async_accept([this](error_code error, tcp::socket socket) {
      if (!error) {
        accept();  // first: what follows may throw
        if (*open >= options.connections) return;
        const std::chrono::duration<double> seconds(options.request_seconds);
        return std::make_shared<Connection>(std::move(socket), page, open, seconds)->start();
      }
      if (error == asio::error::operation_aborted) return;
      // No descriptor left, most likely: some come back when connections run out of time.
      pause.expires_after(std::chrono::milliseconds(100));
      pause.async_wait([this](error_code stopped) {
        if (!stopped) accept();
      });
    });
  }

  /// Serves until it is stopped. What a handler cannot have, memory above all, costs its connection and never the
  /// training.
  void serve() noexcept {
    while (true) {
      try {
        context.run();
        return;
      } catch (...) {  // a context may be run again after an exception
      }
    }
  }

  MetricsServerOptions options;
  Page page;
  std::shared_ptr<int> open = std::make_shared<int>(0);  // connections; the server's thread alone counts
  asio::io_context context{1};
  tcp::acceptor acceptor{context};
  asio::steady_timer pause{context};
  tcp::endpoint at;
  std::thread thread;
};

void MetricsServer::check_address(const std::string& address) { static_cast<void>(numeric(address)); }

MetricsServer::MetricsServer(const std::string& address, int port, const MetricsServerOptions& options)
    : impl_(std::make_unique<Impl>(options)) {
  impl_->listen(address, port);
  impl_->accept();
  impl_->thread = start_thread("metrics", [impl = impl_.get()] { impl->serve(); });
}

MetricsServer::~MetricsServer() {
  impl_->context.stop();
  impl_->thread.join();
}

int MetricsServer::port() const noexcept { return impl_->at.port(); }

std::string MetricsServer::url() const {
  const auto address = impl_->at.address();
  const std::string host = address.is_v6() ? "[" + address.to_string() + "]" : address.to_string();
  return fmt::format("http://{}:{}/metrics", host, port());
}

void MetricsServer::publish(std::string text) { impl_->page.set(std::move(text)); }

}  // namespace tandem
