#pragma once
// One text over HTTP, for Prometheus to scrape. Clients are served by a thread of their own, which holds a
// bounded number of connections for a bounded time: nothing they do reaches the thread that publishes.
#include <memory>
#include <string>

namespace tandem {

struct MetricsServerOptions {
  int connections = 256;         ///< connections open at once; further ones are closed at once
  double request_seconds = 5.0;  ///< seconds for a request to arrive whole and its answer to be taken
};

class MetricsServer {
 public:
  /// Throws UsageError where `address` is no IPv4 or IPv6 address in numbers.
  static void check_address(const std::string& address);
  /// Listens on `address` (IPv4 or IPv6, numeric) and `port` (0: a free one). Throws UsageError on an address
  /// that is none, DeviceError where the port cannot be had.
  MetricsServer(const std::string& address, int port, const MetricsServerOptions& options = {});
  /// Closes all connections.
  ~MetricsServer();
  MetricsServer(const MetricsServer&) = delete;
  MetricsServer& operator=(const MetricsServer&) = delete;

  int port() const noexcept;
  /// "http://127.0.0.1:9400/metrics".
  std::string url() const;
  /// Sets the text that GET /metrics answers from now on. Thread-safe; waits for no client.
  void publish(std::string text);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tandem
