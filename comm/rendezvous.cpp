#include "comm/rendezvous.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/address.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "comm/door.hpp"
#include "comm/group_call.hpp"
#include "comm/link.hpp"
#include "comm/mailbox.hpp"
#include "comm/visit.hpp"
#include "core/base/error.hpp"
#include "core/base/stall.hpp"
#include "core/base/start_thread.hpp"
#include "core/base/trace.hpp"

namespace tandem {
namespace {

namespace asio = boost::asio;
using std::chrono::steady_clock;

constexpr std::chrono::seconds leaving_limit(2);  // until the other side has closed too
constexpr int pings_in_silence = 5;

Message message_of(const std::vector<Fact>& facts) {
  Message message{.kind = MessageKind::facts};
  for (const Fact& fact : facts) {
    message.fields.push_back(fact.name);
    message.fields.push_back(fact.value);
  }
  return message;
}

void check(const RendezvousOptions& options) {
  const Rank rank = options.rank;
  if (rank.count < 1 || rank.index < 0 || rank.index >= rank.count) {
    throw MisuseError(fmt::format("there is no rank {} of {}", rank.index, rank.count));
  }
  if (rank.count > 1 && options.secret.empty()) {
    throw UsageError("ranks in several processes have no secret", "", "start all with one TANDEM_TOKEN");
  }
  std::size_t bytes = 0;
  for (const Fact& fact : options.facts) bytes += fact.name.size() + fact.value.size() + 8;
  if (bytes > value_limit) throw MisuseError("facts of a rendezvous are longer than 64 KiB");
}

/// Address and port at which rank 0 listens, for lines about waiting. A name may stand for an address that this machine
/// alone reaches, as Debian's /etc/hosts has 127.0.1.1 for the machine's own name: then nobody comes from elsewhere.
std::string place_of(const std::string& host, const Door& door) {
  const std::string place = fmt::format("{}:{}", host, door.port());
  const bool is_number = host == door.address();
  if (is_number || !asio::ip::make_address(door.address()).is_loopback()) return place;
  return fmt::format("{} ({}, which other machines cannot reach: ranks there need another MASTER_ADDR, on all ranks)",
                     place, door.address());
}

}  // namespace

/// Everything but the mailbox belongs to the thread that runs the context.
class Rendezvous::Impl {
 public:
  explicit Impl(RendezvousOptions options);
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  Rank rank() const noexcept { return options_.rank; }
  const std::string& address() const noexcept { return address_; }
  Mailbox& mailbox() noexcept { return mailbox_; }
  /// Sends a message of this rank to rank 0; `receiver`: of the values of the meeting to which it comes.
  void say(Message message, Receiver receiver = {});
  void leave() noexcept;

 private:
  bool is_host() const noexcept { return options_.rank.index == 0; }
  void serve() noexcept;
  void begin_as_host();
  void begin_as_member();
  void say_now(const Message& message, Receiver receiver = {});
  void notice(const std::string& line);
  void deliver(const Message& message);
  // Rank 0's side.
  void enter(int rank, int count, const std::shared_ptr<Link>& link);
  void take(int rank, const Message& message, Receiver receiver = {});
  void tell(int rank, const Message& message);
  void lose_silent_ranks();
  // The side of the other ranks.
  void arrived(std::shared_ptr<Link> link, std::exception_ptr error);
  void hear(const Message& message);
  void lose_host(const std::string& why);
  void lose_silent_host();

  void tick();
  bool silent(const Link& link) const;
  void say_goodbye();
  void opened();
  void gone();

  const RendezvousOptions options_;
  const std::chrono::duration<double> silence_;
  Mailbox mailbox_;
  std::string address_;  ///< set before the start
  asio::io_context context_{1};
  asio::executor_work_guard<asio::io_context::executor_type> work_{context_.get_executor()};
  asio::steady_timer timer_{context_};
  steady_clock::time_point ticked_ = steady_clock::now();
  steady_clock::time_point awake_since_ = ticked_;  ///< when this process was last found to have stood still
  steady_clock::time_point pinged_ = ticked_;
  std::vector<std::shared_ptr<Link>> links_;  ///< by rank; of the others than rank 0, the one to it
  std::optional<Assembly> assembly_;          ///< on rank 0
  std::optional<Door> door_;                  ///< on rank 0
  std::optional<Visit> visit_;                ///< on the others
  bool host_has_left_ = false;
  bool leaving_ = false;

  std::mutex mutex_;
  std::condition_variable changed_;
  bool said_goodbye_ = false;  ///< under mutex_
  std::size_t open_ = 0;       ///< links that are not closed, under mutex_
  bool left_ = false;          ///< under mutex_
  std::thread thread_;
};

Rendezvous::Impl::Impl(RendezvousOptions options)
    : options_(std::move(options)),
      silence_(options_.silence_seconds),
      mailbox_(options_.rank.index, meetings),
      links_(static_cast<std::size_t>(options_.rank.count)) {
  if (is_host()) begin_as_host();
  thread_ = start_thread("rendezvous", [this] { serve(); });
  if (!is_host()) asio::post(context_, [this] { begin_as_member(); });
  asio::post(context_, [this] { tick(); });
}

Rendezvous::Impl::~Impl() {
  leave();
  context_.stop();
  thread_.join();
}

/// Serves until it is stopped. An exception of a handler, for want of memory above all, ends the group for this rank.
void Rendezvous::Impl::serve() noexcept {
  wake_promptly();
  while (true) {
    try {
      context_.run();
      return;
    } catch (...) {  // a context may be run again after an exception
      mailbox_.end(std::current_exception());
    }
  }
}

void Rendezvous::Impl::begin_as_host() {
  const int count = options_.rank.count;
  assembly_.emplace(count, meetings, options_.limits, trace_now(),
                    [this](int rank, const Message& message) { tell(rank, message); });
  std::string from = "this process";
  if (count > 1) {
    door_.emplace(context_, options_.host, options_.port);
    address_ = door_->address();
    from = place_of(options_.host, *door_);
    if (options_.listening) options_.listening(door_->port());
    door_->open(
        options_.secret, [this](int rank, int ranks, const std::shared_ptr<Link>& link) { enter(rank, ranks, link); },
        options_.warning);
  }
  assembly_->enter(0, count, from);
  say(message_of(options_.facts));
}

void Rendezvous::Impl::begin_as_member() {
  visit_.emplace(
      context_,
      VisitOptions{.rank = options_.rank,
                   .host = options_.host,
                   .port = options_.port,
                   .secret = options_.secret,
                   .seconds = options_.limits.join_seconds,
                   .silent_seconds = options_.limits.silent_seconds,
                   .notice = [this](const std::string& line) { notice(line); }},
      [this](std::shared_ptr<Link> link, std::exception_ptr error) { arrived(std::move(link), std::move(error)); });
}

void Rendezvous::Impl::say(Message message, Receiver receiver) {
  asio::post(context_, [this, message = std::move(message), receiver] { say_now(message, receiver); });
}

// All ranks name one receiver: rank 0, which hands the values out, goes by its own word.
void Rendezvous::Impl::say_now(const Message& message, Receiver receiver) {
  if (is_host()) return take(0, message, receiver);
  if (links_[0]) links_[0]->send(message);
}

void Rendezvous::Impl::notice(const std::string& line) {
  if (options_.notice) options_.notice(fmt::format("rank {}: {}", options_.rank.index, line));
}

/// A message of rank 0 to this rank.
void Rendezvous::Impl::deliver(const Message& message) {
  if (message.kind != MessageKind::waiting) return mailbox_.deliver(message);
  if (!message.fields.empty()) notice(message.fields[0]);
}

// -- rank 0 -------------------------------------------------------------------------------------------

void Rendezvous::Impl::enter(int rank, int count, const std::shared_ptr<Link>& link) {
  opened();
  if (!assembly_->enter(rank, count, link->peer())) {
    link->handle([](const Message&) {}, [this](const std::string&) { gone(); }, stranger_limit);
    if (assembly_->ended()) link->send(*assembly_->ended());
    return link->finish();
  }
  links_[static_cast<std::size_t>(rank)] = link;
  link->handle([this, rank](const Message& message) { take(rank, message); },
               [this, rank](const std::string& why) {
                 links_[static_cast<std::size_t>(rank)] = nullptr;
                 if (!leaving_) assembly_->lose(rank, why);
                 gone();
               },
               member_limit(1));
}

void Rendezvous::Impl::take(int rank, const Message& message, Receiver receiver) {
  assembly_->take(rank, message, trace_now(), receiver);
  if (assembly_->started() && door_) door_->close();
}

void Rendezvous::Impl::tell(int rank, const Message& message) {
  if (rank == 0) return deliver(message);
  if (const auto& link = links_[static_cast<std::size_t>(rank)]) link->send(message);
}

void Rendezvous::Impl::lose_silent_ranks() {
  for (std::size_t rank = 1; rank < links_.size(); ++rank) {
    const std::shared_ptr<Link> link = links_[rank];
    if (!link || !silent(*link)) continue;
    links_[rank] = nullptr;
    assembly_->lose(static_cast<int>(rank), fmt::format("no sign of life for {:.0f} s", silence_.count()));
    // For when it comes to life again; nobody waits for that.
    link->handle([](const Message&) {}, {}, stranger_limit);
    if (assembly_->ended()) link->send(*assembly_->ended());
    link->finish();
    gone();
  }
}

// -- the others ---------------------------------------------------------------------------------------

void Rendezvous::Impl::arrived(std::shared_ptr<Link> link, std::exception_ptr error) {
  if (error) return mailbox_.end(std::move(error));
  links_[0] = std::move(link);
  address_ = links_[0]->local_address();
  opened();
  links_[0]->handle([this](const Message& message) { hear(message); },
                    [this](const std::string& why) {
                      links_[0] = nullptr;
                      lose_host(why);
                      gone();
                    },
                    member_limit(options_.rank.count));
  links_[0]->send(message_of(options_.facts));
}

void Rendezvous::Impl::hear(const Message& message) {
  if (message.kind == MessageKind::leave) host_has_left_ = true;
  deliver(message);
}

void Rendezvous::Impl::lose_host(const std::string& why) {
  if (leaving_ || host_has_left_) return;
  mailbox_.end(std::make_exception_ptr(
      PeerError(fmt::format("rank 0 at {}:{} is lost: {}", options_.host, options_.port, why))));
}

void Rendezvous::Impl::lose_silent_host() {
  if (!links_[0] || !silent(*links_[0])) return;
  std::exchange(links_[0], nullptr)->close();
  lose_host(fmt::format("no sign of life for {:.0f} s", silence_.count()));
  gone();
}

// -- both ---------------------------------------------------------------------------------------------

void Rendezvous::Impl::tick() {
  const steady_clock::time_point now = steady_clock::now();
  if (now - ticked_ > silence_ / 2) awake_since_ = now;  // the others' messages are still to be read
  ticked_ = now;
  if (assembly_) assembly_->look(trace_now(), door_ ? door_->refused() : 0);
  if (visit_) visit_->look(trace_now());
  if (now - pinged_ >= silence_ / pings_in_silence) {
    pinged_ = now;
    for (const auto& link : links_) {
      if (link) link->send({.kind = MessageKind::ping});
    }
    if (is_host()) {
      lose_silent_ranks();
    } else {
      lose_silent_host();
    }
  }
  const std::chrono::duration<double> period = std::min<std::chrono::duration<double>>(watch_tick, silence_ / 10);
  timer_.expires_after(std::chrono::duration_cast<steady_clock::duration>(period));
  timer_.async_wait([this](const boost::system::error_code& stopped) {
    if (!stopped) tick();
  });
}

bool Rendezvous::Impl::silent(const Link& link) const {
  return ticked_ - std::max(link.last_heard(), awake_since_) > silence_;
}

void Rendezvous::Impl::opened() {
  const std::lock_guard lock(mutex_);
  ++open_;
}

void Rendezvous::Impl::gone() {
  const std::lock_guard lock(mutex_);
  --open_;
  changed_.notify_all();
}

void Rendezvous::Impl::say_goodbye() {
  leaving_ = true;
  if (visit_) visit_->stop();
  if (door_) door_->close();
  say_now({.kind = MessageKind::leave});
  for (const auto& link : links_) {
    if (!link) continue;
    if (is_host()) link->send({.kind = MessageKind::leave});
    link->finish();
  }
  const std::lock_guard lock(mutex_);
  said_goodbye_ = true;
  changed_.notify_all();
}

void Rendezvous::Impl::leave() noexcept {
  std::unique_lock lock(mutex_);
  if (std::exchange(left_, true)) return;
  try {
    asio::post(context_, [this] { say_goodbye(); });
    changed_.wait_for(lock, leaving_limit, [this] { return said_goodbye_ && open_ == 0; });
  } catch (...) {  // no memory for the message: the others see the connection end
  }
}

// -- the public class ---------------------------------------------------------------------------------

Rendezvous::Rendezvous(RendezvousOptions options) {
  check(options);
  impl_ = std::make_unique<Impl>(std::move(options));
  impl_->mailbox().wait_for_start();
}

Rendezvous::~Rendezvous() = default;

Rank Rendezvous::rank() const noexcept { return impl_->rank(); }

const std::string& Rendezvous::address() const noexcept { return impl_->address(); }

std::vector<std::string> Rendezvous::meet(std::size_t meeting, const std::string& call, std::string value,
                                          Receiver receiver) {
  if (value.size() > value_limit) {
    throw MisuseError(fmt::format("a rank brings {} bytes to a meeting, which takes {}", value.size(), value_limit));
  }
  if (receiver && (*receiver < 0 || *receiver >= rank().count)) {
    throw MisuseError(fmt::format("there is no rank {} of {} to get values", *receiver, rank().count));
  }
  impl_->mailbox().begin(meeting, call.substr(0, call.find(' ')));
  impl_->say(
      {.kind = MessageKind::call, .number = static_cast<std::uint32_t>(meeting), .fields = {call, std::move(value)}},
      receiver);
  return impl_->mailbox().wait_for(meeting);
}

void Rendezvous::fail(const std::exception_ptr& error) noexcept {
  try {
    impl_->say({.kind = MessageKind::failed, .fields = {message_of(error)}});
  } catch (...) {  // no memory for words: this rank at least goes no further
    impl_->mailbox().end(std::current_exception());
  }
}

void Rendezvous::leave() noexcept { impl_->leave(); }

std::exception_ptr Rendezvous::failure() const { return impl_->mailbox().failure(); }

void Rendezvous::when_broken(std::function<void()> stop) { impl_->mailbox().when_broken(std::move(stop)); }

}  // namespace tandem
