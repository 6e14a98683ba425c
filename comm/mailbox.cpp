#include "comm/mailbox.hpp"

#include <fmt/format.h>

#include <utility>

#include "comm/assembly.hpp"
#include "core/base/error.hpp"
#include "core/base/stall.hpp"

namespace tandem {
namespace {

std::exception_ptr error_of(Ending ending, const std::string& reason) {
  switch (ending) {
    case Ending::stalled:
      return std::make_exception_ptr(StalledError(reason));
    case Ending::misuse:
      return std::make_exception_ptr(MisuseError(reason));
    case Ending::usage:
      return std::make_exception_ptr(UsageError(reason));
    case Ending::device:
      return std::make_exception_ptr(DeviceError(reason));
    case Ending::peer:
    case Ending::left:
      break;
  }
  return std::make_exception_ptr(PeerError(reason));
}

}  // namespace

void Mailbox::deliver(const Message& message) {
  if (message.kind == MessageKind::ended) {
    const std::string reason = message.fields.empty() ? "" : message.fields[0];
    const auto ending = static_cast<Ending>(message.number);
    if (ending == Ending::stalled) report_stall(StalledError(reason));  // before anybody gets the error
    const std::exception_ptr failure = error_of(ending, reason);
    if (ending != Ending::left) return end(failure);
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = failure;
    changed_.notify_all();
    return;
  }
  const std::lock_guard lock(mutex_);
  if (message.kind == MessageKind::start) started_ = true;
  if (message.kind == MessageKind::met && message.number < meetings_.size()) {
    meetings_[message.number].values = message.fields;
  }
  changed_.notify_all();
}

void Mailbox::end(std::exception_ptr failure) noexcept {
  const std::lock_guard lock(mutex_);
  if (!failure_) failure_ = std::move(failure);
  changed_.notify_all();
  if (!std::exchange(broken_, true) && stop_) stop_();
}

void Mailbox::wait_for_start() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return started_ || failure_; });
  if (failure_) std::rethrow_exception(failure_);
}

void Mailbox::begin(std::size_t meeting, std::string_view call) {
  const std::lock_guard lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
  if (std::exchange(meetings_.at(meeting).waited_for, true)) {
    throw MisuseError(fmt::format("rank {} calls {} while it is in another call", rank_, call));
  }
}

std::vector<std::string> Mailbox::wait_for(std::size_t meeting) {
  std::unique_lock lock(mutex_);
  Meeting& at = meetings_[meeting];
  changed_.wait(lock, [&] { return at.values || failure_; });
  at.waited_for = false;
  // A rank that has come with all others has had the call, even if one of them has failed since.
  if (!at.values) std::rethrow_exception(failure_);
  std::vector<std::string> values = std::move(*at.values);
  at.values.reset();
  return values;
}

std::exception_ptr Mailbox::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void Mailbox::when_broken(std::function<void()> stop) {
  const std::lock_guard lock(mutex_);
  stop_ = std::move(stop);
  if (broken_ && stop_) stop_();
}

}  // namespace tandem
