#pragma once
// The way of a rank to rank 0: finds its address, connects, and proves the secret of the launch, as often as it takes.
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "comm/link.hpp"
#include "comm/proof.hpp"
#include "core/base/reminder.hpp"
#include "core/device/group.hpp"

namespace tandem {

struct VisitOptions {
  Rank rank;
  std::string host;  ///< address of rank 0
  int port = 0;
  std::string secret;
  double seconds = 300.0;       ///< until it gives up
  double silent_seconds = 3.0;  ///< until it says what it tries
  std::function<void(const std::string& line)> notice{};
};

/// Used on the one thread that runs its context, which it must outlive.
class Visit {
 public:
  /// Called once: with the link to rank 0, which has proven the secret too, or with an error.
  using Done = std::function<void(std::shared_ptr<Link> link, std::exception_ptr error)>;

  Visit(boost::asio::io_context& context, VisitOptions options, Done done);
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;

  /// Says what it tries, by `notice`, where that takes long. To be called a few times a second; `now`: trace_now().
  void look(double now);
  /// Ends it without a call of `done`.
  void stop() noexcept;

 private:
  static constexpr std::chrono::milliseconds between_tries{100};
  static constexpr std::chrono::milliseconds between_lookups{500};

  void try_once();
  void not_found(const boost::system::error_code& error);
  void connected(boost::asio::ip::tcp::socket socket);
  void answer(const Message& message);
  void welcomed(const Message& message);
  void try_again(const std::string& why, std::chrono::milliseconds after = between_tries);
  void refused(const Message& message);
  void finish(std::shared_ptr<Link> link, std::exception_ptr error);
  std::string target() const;

  const VisitOptions options_;
  const double began_;
  Reminder reminder_;
  Done done_;
  boost::asio::ip::tcp::resolver resolver_;
  boost::asio::ip::tcp::socket socket_;
  boost::asio::steady_timer timer_;
  boost::asio::steady_timer limit_;
  std::shared_ptr<Link> link_;
  Nonces nonces_;
  int lookups_left_ = 3;               ///< while the name server does not answer
  bool stopped_ = false;               ///< handlers that come later do nothing
  std::string why_ = "no answer yet";  ///< why the last try was in vain
};

}  // namespace tandem
