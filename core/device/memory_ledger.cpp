#include "core/device/memory_ledger.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "core/base/error.hpp"
#include "core/device/device.hpp"
#include "core/memory/memory.hpp"

namespace tandem {
namespace {

struct Actions {
  std::string_view reads;
  std::string_view writes;
};

constexpr Actions actions_of(CopyKind kind) {
  switch (kind) {
    case CopyKind::host_to_device:
      return {"copy to the device reads", "copy to the device writes"};
    case CopyKind::device_to_host:
      return {"copy to the host reads", "copy to the host writes"};
    case CopyKind::device_to_device:
      break;
  }
  return {"copy on the device reads", "copy on the device writes"};
}

}  // namespace

void MemoryLedger::book(std::size_t bytes, std::string_view name) {
  const std::lock_guard lock(mutex_);
  if (bytes > capacity_ - allocated_) {
    throw PlanError(fmt::format("device memory is full: '{}' needs {} ({} bytes)", name, format_bytes(bytes), bytes),
                    fmt::format("{} of {} bytes are free, held: {}", capacity_ - allocated_, capacity_, held()),
                    "raise --device-memory", held());
  }
  allocated_ += bytes;
  peak_ = std::max(peak_.load(), allocated_.load());
}

void MemoryLedger::enter(const void* data, std::size_t bytes, std::string_view name) {
  const std::lock_guard lock(mutex_);
  const std::uintptr_t begin = reinterpret_cast<std::uintptr_t>(data);
  live_.emplace(begin, Allocation{begin, bytes, std::string(name)});
}

void MemoryLedger::leave(const void* data) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = live_.find(reinterpret_cast<std::uintptr_t>(data));
  if (found == live_.end()) return;
  try {
    if (freed_.size() == remembered) freed_.pop_front();
    freed_.push_back(std::move(found->second));
  } catch (...) {
    // The memory of names is a courtesy.
  }
  live_.erase(found);
}

std::string MemoryLedger::table() const {
  const std::lock_guard lock(mutex_);
  return held();
}

std::string MemoryLedger::held() const {
  if (live_.empty()) return "nothing";
  std::vector<const Allocation*> held;
  for (const auto& [begin, allocation] : live_) held.push_back(&allocation);
  std::stable_sort(held.begin(), held.end(), [](auto* a, auto* b) { return a->bytes > b->bytes; });
  std::string text;
  for (const Allocation* a : held) {
    text += fmt::format("{}'{}' {}", text.empty() ? "" : ", ", a->name, format_bytes(a->bytes));
  }
  return text;
}

const MemoryLedger::Allocation* MemoryLedger::before(std::uintptr_t address) const {
  const auto next = live_.upper_bound(address);
  return next == live_.begin() ? nullptr : &std::prev(next)->second;
}

std::string MemoryLedger::describe(std::uintptr_t address) const {
  for (auto a = freed_.rbegin(); a != freed_.rend(); ++a) {
    if (a->holds(address)) return fmt::format("the freed buffer '{}'", a->name);
  }
  return "no allocation of the device";
}

void MemoryLedger::require_inside(const void* data, std::size_t bytes, std::string_view action) const {
  const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(data);
  const std::lock_guard lock(mutex_);
  const Allocation* a = before(address);
  if (a == nullptr || !a->holds(address)) {
    throw MisuseError(fmt::format("{} {}", action, describe(address)), fmt::format("{} bytes at {}", bytes, data));
  }
  const std::size_t offset = address - a->begin;
  if (bytes > a->bytes - offset) {
    throw MisuseError(fmt::format("{} beyond the end of '{}'", action, a->name),
                      fmt::format("{} bytes at offset {} of {}", bytes, offset, a->bytes));
  }
}

void MemoryLedger::require_outside(const void* data, std::size_t bytes, std::string_view action) const {
  const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(data);
  const std::lock_guard lock(mutex_);
  const Allocation* a = before(address + bytes - 1);
  if (a != nullptr && a->begin + a->bytes > address) {
    throw MisuseError(fmt::format("{} the device buffer '{}' as if it were host memory", action, a->name));
  }
}

void MemoryLedger::require_copyable(const void* to, const void* from, std::size_t bytes, CopyKind kind) const {
  const Actions actions = actions_of(kind);
  if (to == nullptr || from == nullptr) {
    throw MisuseError(fmt::format("{} a null pointer", from == nullptr ? actions.reads : actions.writes));
  }
  if (kind == CopyKind::host_to_device) {
    require_outside(from, bytes, actions.reads);
  } else {
    require_inside(from, bytes, actions.reads);
  }
  if (kind == CopyKind::device_to_host) {
    require_outside(to, bytes, actions.writes);
  } else {
    require_inside(to, bytes, actions.writes);
  }
  const std::uintptr_t a = reinterpret_cast<std::uintptr_t>(to);
  const std::uintptr_t b = reinterpret_cast<std::uintptr_t>(from);
  if (a < b + bytes && b < a + bytes) throw MisuseError(fmt::format("{} what it writes", actions.reads));
}

}  // namespace tandem
