#pragma once
// Rank 0's listening socket: lets ranks in that prove the secret of the launch, and keeps everybody else out.
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <functional>
#include <list>
#include <memory>
#include <set>
#include <string>

#include "comm/link.hpp"
#include "comm/proof.hpp"

namespace tandem {

/// Connections that have not proven the secret are bounded in number, time and memory: `strangers` at once, of which
/// the oldest gives way to a newcomer, `seconds` each, stranger_limit bytes each. Used on the one thread that runs its
/// context, which it must outlive.
class Door {
 public:
  static constexpr std::size_t strangers = 128;
  static constexpr double seconds = 5.0;

  /// A process that has proven the secret, and what it says about itself. The link's handlers are still the door's: the
  /// callee sets its own (`Link::handle`) or closes it.
  using OnRank = std::function<void(int rank, int count, std::shared_ptr<Link> link)>;
  /// Takes a line that says who was refused and why: the first one that had another secret, or another version, alone,
  /// as strangers may come as often as they like.
  using OnRefused = std::function<void(const std::string& line)>;

  /// Listens at `host`, the name or number of an address of this machine, and at no other; `port` 0: a free one. Throws
  /// UsageError where no interface of this machine has the address, DeviceError where it cannot be had otherwise.
  Door(boost::asio::io_context& context, const std::string& host, int port);
  Door(const Door&) = delete;
  Door& operator=(const Door&) = delete;

  int port() const noexcept { return at_.port(); }
  /// Address in numbers.
  std::string address() const { return at_.address().to_string(); }
  /// Begins to let ranks in.
  void open(std::string secret, OnRank on_rank, OnRefused on_refused = {});
  /// Listens no more, and drops those who wait to be let in.
  void close() noexcept;
  /// Connections that had another secret so far.
  int refused() const noexcept { return refused_; }

 private:
  /// A connection that has not proven the secret. Handlers may come late: they hold it weakly.
  struct Guest {
    std::shared_ptr<Link> link;
    Nonces nonces;
    boost::asio::steady_timer limit;
  };
  using GuestPtr = std::shared_ptr<Guest>;

  void accept();
  void welcome(boost::asio::ip::tcp::socket socket);
  void challenge(const GuestPtr& guest, const Message& hello);
  void judge(const GuestPtr& guest, const Message& proof);
  void refuse(const GuestPtr& guest, Refusal reason, const std::string& why, const std::string& advice);
  void ignore(const GuestPtr& /*guest*/, const Message& /*message*/) {}
  void drop(const GuestPtr& guest) noexcept;
  void answer_by(const GuestPtr& guest, void (Door::*step)(const GuestPtr&, const Message&));

  boost::asio::io_context& context_;
  boost::asio::ip::tcp::acceptor acceptor_;
  boost::asio::steady_timer pause_;
  boost::asio::ip::tcp::endpoint at_;
  std::string secret_;
  OnRank on_rank_;
  OnRefused on_refused_;
  std::list<GuestPtr> guests_;  ///< the oldest first
  int refused_ = 0;
  std::set<Refusal> told_;  ///< reasons of which on_refused_ has had a line
  bool closed_ = false;     ///< handlers that come later do nothing
};

}  // namespace tandem
