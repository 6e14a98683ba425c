#include "tests/gpu_ops/fake_nccl/exchange.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "tests/gpu_ops/fake_nccl/fake_nccl.hpp"
#include "tests/gpu_ops/fake_runtime/fake_machine.hpp"

namespace tandem::fake_nccl {

using fake_cuda::State;

bool on_card(const Shared& shared, const std::vector<Operation>& operations, const std::string& when) {
  const bool all = std::ranges::all_of(operations, [&](const Operation& each) {
    return State::get().on_device(each.data, each.bytes, shared.own.card);
  });
  if (!all) State::get().complain("NCCL " + when);
  return all;
}

void Delays::take() {
  const int longest = longest_delay_us();
  std::uint64_t drawn = 0;
  {
    const std::lock_guard lock(mutex_);
    drawn = random_();
  }
  if (longest == 0 || drawn % 2 == 0) return;
  std::this_thread::sleep_for(std::chrono::microseconds(drawn / 2 % static_cast<std::uint64_t>(longest)));
}

bool Delays::at_once() {
  const std::lock_guard lock(mutex_);
  return random_() % 2 == 0;
}

Exchange::Exchange(std::shared_ptr<Shared> shared, const std::vector<Operation>& operations)
    : shared_(std::move(shared)) {
  for (const Operation& each : operations) {
    flows_[{each.sends, each.peer}].push_back({.operation = each, .header = each.bytes});
  }
}

void Exchange::run() {
  copy_own();
  while (!flows_.empty() && !shared_->aborted) {
    if (!progress()) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

/// A rank may send to itself, where it also receives in the same group.
void Exchange::copy_own() {
  const int own = shared_->own.rank;
  std::deque<Flow> sent = std::exchange(flows_[{true, own}], {});
  std::deque<Flow> received = std::exchange(flows_[{false, own}], {});
  flows_.erase({true, own});
  flows_.erase({false, own});
  for (; !sent.empty() && !received.empty(); sent.pop_front(), received.pop_front()) {
    const Operation& from = sent.front().operation;
    const Operation& to = received.front().operation;
    if (from.bytes != to.bytes) State::get().complain("NCCL: a rank receives another size from itself than it sends");
    std::memcpy(to.data, from.data, std::min(from.bytes, to.bytes));
  }
  if (sent.size() + received.size() > 0) State::get().complain("NCCL: a rank sends to itself and does not receive");
}

bool Exchange::progress() {
  bool moved = false;
  for (auto at = flows_.begin(); at != flows_.end() && !stands_still_;) {
    std::deque<Flow>& waiting = at->second;
    moved |= advance(waiting.front());
    if (waiting.front().complete()) waiting.pop_front();
    at = waiting.empty() ? flows_.erase(at) : std::next(at);
  }
  return moved;
}

/// Returns whether anything has moved.
bool Exchange::advance(Flow& flow) {
  if (flow.header_done < sizeof flow.header) return advance_header(flow);
  const std::ptrdiff_t now = move(flow, flow.operation.data + flow.done, flow.operation.bytes - flow.done);
  if (now <= 0) return false;
  if (breaks_bytes() && !flow.operation.sends) flow.operation.data[flow.done] ^= std::byte{1};
  flow.done += static_cast<std::size_t>(now);
  return true;
}

bool Exchange::advance_header(Flow& flow) {
  auto* const header = reinterpret_cast<std::byte*>(&flow.header);
  const std::ptrdiff_t now = move(flow, header + flow.header_done, sizeof flow.header - flow.header_done);
  if (now <= 0) return false;
  flow.header_done += static_cast<std::size_t>(now);
  if (flow.header_done == sizeof flow.header && flow.header != flow.operation.bytes) {
    State::get().complain("NCCL: rank " + std::to_string(shared_->own.rank) + " receives " +
                          std::to_string(flow.operation.bytes) + " bytes from rank " +
                          std::to_string(flow.operation.peer) + ", which sends " + std::to_string(flow.header));
    stand_still(invalid_usage);
  }
  return true;
}

std::ptrdiff_t Exchange::move(const Flow& flow, std::byte* data, std::size_t bytes) {
  const int peer = flow.operation.peer;
  const std::ptrdiff_t now = flow.operation.sends ? shared_->wires.send_some(peer, data, bytes)
                                                  : shared_->wires.receive_some(peer, data, bytes);
  if (now < 0) stand_still(tells_lost_ranks() ? remote_error : success);
  return now;
}

void Exchange::stand_still(int code) {
  stands_still_ = true;
  int none = success;
  shared_->state.compare_exchange_strong(none, code);
}

}  // namespace tandem::fake_nccl
