#include "comm/door.hpp"

#include <fmt/format.h>

#include <charconv>
#include <chrono>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/version.hpp"

namespace tandem {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

namespace {

[[noreturn]] void cannot_listen(const std::string& host, int port, const error_code& why) {
  const std::string what = fmt::format("rank 0 cannot listen at {}:{}", host, port);
  if (why == boost::system::errc::address_not_available) {
    throw UsageError(what, "no interface of this machine has that address",
                     "set MASTER_ADDR to an address of this machine, or start rank 0 where it is one");
  }
  throw DeviceError(what, why.message(),
                    "MASTER_ADDR is an address of rank 0's own machine, MASTER_PORT one that is free there");
}

/// A number in digits alone; -1 where the text is none.
int number_in(const std::string& text) {
  int value = -1;
  const char* const end = text.data() + text.size();
  const auto [read, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && read == end ? value : -1;
}

}  // namespace

Door::Door(asio::io_context& context, const std::string& host, int port)
    : context_(context), acceptor_(context), pause_(context) {
  error_code error;
  const auto found = tcp::resolver(context).resolve(host, std::to_string(port), tcp::resolver::numeric_service, error);
  if (error) throw no_such_address(0, host, error);
  at_ = found.begin()->endpoint();
  acceptor_.open(at_.protocol(), error);
  if (!error) acceptor_.set_option(tcp::acceptor::reuse_address(true), error);
  if (!error) acceptor_.bind(at_, error);
  if (!error) acceptor_.listen(asio::socket_base::max_listen_connections, error);
  if (error) cannot_listen(host, port, error);
  at_ = acceptor_.local_endpoint();
}

void Door::open(std::string secret, OnRank on_rank, OnRefused on_refused) {
  secret_ = std::move(secret);
  on_rank_ = std::move(on_rank);
  on_refused_ = std::move(on_refused);
  accept();
}

void Door::accept() {
  acceptor_.async_accept([this](const error_code& error, tcp::socket socket) {
    if (closed_) return;
    if (!error) {
      accept();  // first: what follows may throw
      return welcome(std::move(socket));
    }
    // No descriptor left, most likely: some come back when strangers run out of time.
    pause_.expires_after(std::chrono::milliseconds(100));
    pause_.async_wait([this](const error_code& stopped) {
      if (!stopped && !closed_) accept();
    });
  });
}

void Door::welcome(tcp::socket socket) {
  if (guests_.size() >= strangers) drop(GuestPtr(guests_.front()));
  const auto link = std::make_shared<Link>(std::move(socket), stranger_limit);
  const auto guest = std::make_shared<Guest>(Guest{link, {}, asio::steady_timer(context_)});
  guests_.push_back(guest);
  guest->limit.expires_after(std::chrono::milliseconds(static_cast<int>(seconds * 1000)));
  guest->limit.async_wait([this, weak = std::weak_ptr(guest)](const error_code& stopped) {
    if (const GuestPtr late = weak.lock(); late && !stopped) drop(late);
  });
  answer_by(guest, &Door::challenge);
  link->start();
}

void Door::answer_by(const GuestPtr& guest, void (Door::*step)(const GuestPtr&, const Message&)) {
  const std::weak_ptr<Guest> weak = guest;
  guest->link->handle(
      [this, weak, step](const Message& message) {
        if (const GuestPtr still = weak.lock()) (this->*step)(still, message);
      },
      [this, weak](const std::string&) {
        if (const GuestPtr still = weak.lock()) drop(still);
      },
      stranger_limit);
}

void Door::challenge(const GuestPtr& guest, const Message& hello) {
  const bool is_known = hello.fields.size() == 2 || hello.fields.size() == 3;
  if (hello.kind != MessageKind::hello || !is_known || hello.fields[0] != wire_magic ||
      hello.fields[1].size() != nonce_bytes) {
    return drop(guest);
  }
  if (hello.number != wire_version) {
    const std::string its = hello.fields.size() == 3 ? hello.fields[2] : "unknown";
    return refuse(guest, Refusal::another_version,
                  fmt::format("is of version {}, and rank 0 of {}", version_text(std::to_string(hello.number), its),
                              version_text(std::to_string(wire_version), std::string(version))),
                  "install one version on all machines");
  }
  guest->nonces = {random_nonce(), hello.fields[1]};
  answer_by(guest, &Door::judge);
  guest->link->send({.kind = MessageKind::challenge, .fields = {guest->nonces.of_host}});
}

void Door::judge(const GuestPtr& guest, const Message& proof) {
  if (proof.kind != MessageKind::proof || proof.fields.size() != 2) return drop(guest);
  const int count = number_in(proof.fields[0]);
  if (count < 0 || proof.number > INT32_MAX) return drop(guest);
  const auto expected = proof_of(secret_, guest->nonces, proof.number, static_cast<std::uint32_t>(count));
  if (!same_proof(expected, proof.fields[1])) {
    ++refused_;
    return refuse(guest, Refusal::another_secret,
                  fmt::format("says that it is rank {}, and its secret differs from rank 0's", proof.number),
                  "start all ranks of a launch with one TANDEM_TOKEN");
  }
  const std::shared_ptr<Link> link = guest->link;
  link->send({.kind = MessageKind::welcome,
              .fields = {proof_of(secret_, guest->nonces, 0, static_cast<std::uint32_t>(count))}});
  guests_.remove(guest);
  on_rank_(static_cast<int>(proof.number), count, link);
}

// The other side has its time to read why, and to close.
void Door::refuse(const GuestPtr& guest, Refusal reason, const std::string& why, const std::string& advice) {
  answer_by(guest, &Door::ignore);
  Message refused{.kind = MessageKind::refused, .number = static_cast<std::uint32_t>(reason)};
  if (reason == Refusal::another_version) refused.fields = {std::to_string(wire_version), std::string(version)};
  guest->link->send(refused);
  guest->link->finish();
  if (!on_refused_ || !told_.insert(reason).second) return;
  on_refused_(fmt::format("a process at {} was refused: it {}; {}", guest->link->peer(), why, advice));
}

void Door::drop(const GuestPtr& guest) noexcept {
  guest->link->close();
  guests_.remove(guest);
}

void Door::close() noexcept {
  closed_ = true;
  error_code ignored;
  acceptor_.close(ignored);
  pause_.cancel();
  for (const GuestPtr& guest : guests_) guest->link->close();
  guests_.clear();
}

}  // namespace tandem
