#include "core/memory/memory.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "core/base/error.hpp"

namespace tandem {
namespace {

/// Peak of the plan's bytes: entries of the whole run and, beside them, the largest phase, as phases follow one
/// another.
template <class Counts>
std::size_t most_at_once(const std::vector<MemoryEntry>& entries, Counts counts) noexcept {
  std::size_t always = 0;
  std::size_t largest_phase = 0;
  for (const MemoryEntry& entry : entries) {
    if (!counts(entry.place)) continue;
    if (entry.phase == "run") {
      always += entry.bytes;
      continue;
    }
    std::size_t phase = 0;
    for (const MemoryEntry& other : entries) {
      if (counts(other.place) && other.phase == entry.phase) phase += other.bytes;
    }
    largest_phase = std::max(largest_phase, phase);
  }
  return always + largest_phase;
}

}  // namespace

MemoryBlock::MemoryBlock(void* data, std::size_t bytes, Deleter deleter)
    : data_(data), bytes_(bytes), deleter_(std::move(deleter)) {}

MemoryBlock::MemoryBlock(MemoryBlock&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      deleter_(std::exchange(other.deleter_, nullptr)) {}

MemoryBlock& MemoryBlock::operator=(MemoryBlock&& other) noexcept {
  // Through a temporary: the old block goes at once, and assigning to itself keeps it.
  MemoryBlock taken(std::move(other));
  std::swap(data_, taken.data_);
  std::swap(bytes_, taken.bytes_);
  std::swap(deleter_, taken.deleter_);
  return *this;
}

MemoryBlock::~MemoryBlock() {
  if (data_ != nullptr && deleter_) deleter_(data_, bytes_);
}

Arena::Arena(void* data, std::size_t bytes, std::string name)
    : data_(static_cast<std::byte*>(data)), bytes_(bytes), name_(std::move(name)) {
  if (reinterpret_cast<std::uintptr_t>(data) % arena_alignment != 0) {
    throw MisuseError(fmt::format("arena '{}' is not aligned", name_),
                      fmt::format("{} bytes are needed", arena_alignment));
  }
  if (data == nullptr && bytes > 0) throw MisuseError(fmt::format("arena '{}' has no memory", name_));
}

void* Arena::carve(std::size_t bytes, std::string_view what) {
  // Compared before rounding, so that a size near the top of the range cannot wrap around to a small one.
  const std::size_t left = bytes_ - used_;
  if (bytes > left || align_up(bytes) > left) {
    throw MisuseError(fmt::format("arena '{}' is exhausted by '{}'", name_, what),
                      fmt::format("{} bytes asked for, {} of {} left", bytes, left, bytes_));
  }
  void* part = data_ + used_;
  used_ += align_up(bytes);
  return part;
}

std::string_view name_of(Place place) noexcept {
  switch (place) {
    case Place::device:
      return "device";
    case Place::pinned:
      return "pinned";
    case Place::pageable:
      return "pageable";
    case Place::file:
      return "file";
  }
  return "unknown";
}

void MemoryPlan::add(std::string name, std::string phase, Place place, std::size_t bytes) {
  if (name.empty() || phase.empty()) throw MisuseError("memory plan entry without a name or phase");
  const bool taken = std::any_of(entries.begin(), entries.end(),
                                 [&](const MemoryEntry& e) { return e.place == place && e.name == name; });
  if (taken) throw MisuseError(fmt::format("memory plan names '{}' twice in {} memory", name, name_of(place)));
  if (bytes == 0) return;
  entries.push_back({std::move(name), std::move(phase), place, align_up(bytes)});
}

void MemoryPlan::unpin(std::size_t bytes) {
  bytes = align_up(bytes);
  for (std::size_t i = entries.size(); i-- > 0 && bytes > 0;) {
    if (entries[i].place != Place::pinned) continue;
    MemoryEntry pageable = entries[i];
    pageable.place = Place::pageable;
    pageable.bytes = std::min(bytes, pageable.bytes);
    bytes -= pageable.bytes;
    entries[i].bytes -= pageable.bytes;
    if (entries[i].bytes == 0) {
      entries[i] = std::move(pageable);
    } else {
      entries.insert(entries.begin() + static_cast<std::ptrdiff_t>(i) + 1, std::move(pageable));
    }
  }
}

std::size_t MemoryPlan::device_bytes() const noexcept { return bytes_in(Place::device); }

std::size_t MemoryPlan::host_bytes() const noexcept {
  return most_at_once(entries, [](Place place) { return place == Place::pinned || place == Place::pageable; });
}

std::size_t MemoryPlan::bytes_in(Place place) const noexcept {
  return most_at_once(entries, [place](Place other) { return other == place; });
}

std::string format_bytes(std::size_t bytes) {
  if (bytes < 1024) return fmt::format("{} B", bytes);
  struct Unit {
    const char* name;
    int decimals;
  };
  constexpr std::array<Unit, 4> units{{{"KiB", 1}, {"MiB", 1}, {"GiB", 2}, {"TiB", 2}}};
  double value = static_cast<double>(bytes) / 1024.0;
  std::size_t unit = 0;
  // A value that would print as 1024.0 gets the next unit.
  while (unit + 1 < units.size() && value >= 1023.95) {
    value /= 1024.0;
    ++unit;
  }
  return fmt::format("{:.{}f} {}", value, units[unit].decimals, units[unit].name);
}

}  // namespace tandem
