#include "comm/visit.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <boost/asio/connect.hpp>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/trace.hpp"
#include "core/base/version.hpp"

namespace tandem {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

Visit::Visit(asio::io_context& context, VisitOptions options, Done done)
    : options_(std::move(options)),
      began_(trace_now()),
      reminder_(began_, options_.silent_seconds),
      done_(std::move(done)),
      resolver_(context),
      socket_(context),
      timer_(context),
      limit_(context) {
  limit_.expires_after(std::chrono::milliseconds(static_cast<std::int64_t>(options_.seconds * 1000)));
  limit_.async_wait([this](const error_code& stopped) {
    if (stopped || stopped_) return;
    finish(nullptr, std::make_exception_ptr(
                        DeviceError(fmt::format("rank {} cannot reach rank 0 at {} within {:.0f} s",
                                                options_.rank.index, target(), options_.seconds),
                                    why_, "start rank 0, and give all ranks its MASTER_ADDR and MASTER_PORT")));
  });
  try_once();
}

std::string Visit::target() const { return fmt::format("{}:{}", options_.host, options_.port); }

void Visit::try_once() {
  resolver_.async_resolve(options_.host, std::to_string(options_.port), tcp::resolver::numeric_service,
                          [this](const error_code& error, const tcp::resolver::results_type& found) {
                            if (stopped_) return;
                            if (error) return not_found(error);
                            asio::async_connect(socket_, found, [this](const error_code& failed, const tcp::endpoint&) {
                              if (stopped_) return;
                              if (failed) return try_again(failed.message());
                              connected(std::exchange(socket_, tcp::socket(socket_.get_executor())));
                            });
                          });
}

/// A name that stands for nothing now will not later. A name server that does not answer may.
void Visit::not_found(const error_code& error) {
  if (error == asio::error::host_not_found_try_again && --lookups_left_ > 0) {
    return try_again(error.message(), between_lookups);
  }
  finish(nullptr, std::make_exception_ptr(no_such_address(options_.rank.index, options_.host, error)));
}

void Visit::connected(tcp::socket socket) {
  link_ = std::make_shared<Link>(std::move(socket), stranger_limit);
  link_->handle([this](const Message& message) { answer(message); },
                [this](const std::string& reason) { try_again(reason); }, stranger_limit);
  link_->start();
  nonces_ = {.of_host = "", .of_member = random_nonce()};
  link_->send({.kind = MessageKind::hello,
               .number = wire_version,
               .fields = {std::string(wire_magic), nonces_.of_member, std::string(version)}});
}

void Visit::answer(const Message& message) {
  if (message.kind == MessageKind::challenge && message.fields.size() == 1 && message.fields[0].size() == nonce_bytes &&
      nonces_.of_host.empty()) {
    nonces_.of_host = message.fields[0];
    const auto rank = static_cast<std::uint32_t>(options_.rank.index);
    const auto count = static_cast<std::uint32_t>(options_.rank.count);
    return link_->send({.kind = MessageKind::proof,
                        .number = rank,
                        .fields = {std::to_string(count), proof_of(options_.secret, nonces_, rank, count)}});
  }
  if (message.kind == MessageKind::refused) return refused(message);
  if (message.kind == MessageKind::welcome && message.fields.size() == 1) return welcomed(message);
  link_->close();
  try_again("another program answers there");
}

void Visit::refused(const Message& message) {
  const int rank = options_.rank.index;
  std::string why = "its secret differs from rank 0's";
  std::string advice = "start all ranks of a launch with one TANDEM_TOKEN";
  if (message.number == static_cast<std::uint32_t>(Refusal::another_version)) {
    const bool told = message.fields.size() == 2;
    why = fmt::format("they differ in version: {} (rank 0), {} (rank {})",
                      told ? version_text(message.fields[0], message.fields[1]) : "another",
                      version_text(std::to_string(wire_version), std::string(version)), rank);
    advice = "install one version on all machines";
  }
  finish(nullptr, std::make_exception_ptr(
                      UsageError(fmt::format("rank {} is refused by rank 0 at {}", rank, target()), why, advice)));
}

void Visit::welcomed(const Message& message) {
  const auto expected = proof_of(options_.secret, nonces_, 0, static_cast<std::uint32_t>(options_.rank.count));
  if (nonces_.of_host.empty() || !same_proof(expected, message.fields[0])) {
    return finish(nullptr, std::make_exception_ptr(UsageError(
                               fmt::format("{} does not know the secret of rank {}", target(), options_.rank.index), "",
                               "look at MASTER_ADDR and MASTER_PORT, and start all ranks with one TANDEM_TOKEN")));
  }
  finish(std::exchange(link_, nullptr), nullptr);
}

void Visit::look(double now) {
  if (stopped_ || !reminder_.due(now) || !options_.notice) return;
  options_.notice(fmt::format("waiting for rank 0 at {}: {}; trying for another {:.0f} s", target(), why_,
                              std::max(0.0, began_ + options_.seconds - now)));
}

void Visit::try_again(const std::string& why, std::chrono::milliseconds after) {
  why_ = why;
  timer_.expires_after(after);
  timer_.async_wait([this](const error_code& stopped) {
    if (!stopped && !stopped_) try_once();
  });
}

void Visit::finish(std::shared_ptr<Link> link, std::exception_ptr error) {
  stop();
  done_(std::move(link), std::move(error));
}

void Visit::stop() noexcept {
  stopped_ = true;
  error_code ignored;
  resolver_.cancel();
  socket_.close(ignored);
  timer_.cancel();
  limit_.cancel();
  if (link_) link_->close();
}

}  // namespace tandem
