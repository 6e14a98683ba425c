#include "data/window_sampler.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "core/base/error.hpp"
#include "core/numerics/random.hpp"

namespace tandem {

std::int64_t window_count(std::int64_t tokens, std::int64_t length) noexcept {
  return tokens > 0 ? (tokens - 1) / length : 0;
}

std::int64_t require_windows(const TokenSource& source, std::int64_t length, std::string_view name) {
  if (source.layout() != TokenLayout::stream) {
    if (source.row_length() > length + 1) {
      throw InputError(
          fmt::format("{} in rows", name),
          fmt::format("a row has {} tokens, a window of {} takes {}", source.row_length(), length, length + 1),
          fmt::format("give --seq-len {}, or prepare shorter rows", source.row_length() - 1));
    }
    return source.size() / source.row_length();
  }
  const std::int64_t windows = window_count(source.size(), length);
  if (windows == 0) {
    throw InputError(fmt::format("{} shorter than one sequence", name),
                     fmt::format("{} tokens, but a window of {} needs {}", source.size(), length, length + 1),
                     "give more data or a smaller --seq-len");
  }
  return windows;
}

namespace {

void require_alike(const WindowView& window) {
  const std::size_t length = window.inputs.size();
  const std::size_t records = window.record_first.empty() ? 0 : length;
  if (window.targets.size() == length && window.record_first.size() == records && window.record_end.size() == records) {
    return;
  }
  throw MisuseError("spans of a window differ in length",
                    fmt::format("{} inputs, {} targets, {} and {} ends of records", length, window.targets.size(),
                                window.record_first.size(), window.record_end.size()));
}

/// Starts of records (1, else 0) to the positions at which each input's record begins and ends.
void bound_records(std::span<std::int32_t> first, std::span<std::int32_t> end) {
  std::int32_t begin = 0;
  for (std::size_t i = 0; i < first.size(); ++i) {
    if (first[i] != 0) begin = static_cast<std::int32_t>(i);
    first[i] = begin;
  }
  for (std::size_t i = first.size(); i-- > 0;) {
    const bool last = i + 1 == first.size() || first[i + 1] != first[i];
    end[i] = last ? static_cast<std::int32_t>(i + 1) : end[i + 1];
  }
}

/// Records of a window of which the first `length` inputs are tokens from `position` on, and the others padding.
void read_records(const TokenSource& source, std::int64_t position, std::size_t length, const WindowView& window) {
  std::ranges::fill(window.record_first, 0);
  if (source.bounded()) {
    source.read_record_starts(position, window.record_first.first(length));
    if (length < window.record_first.size()) window.record_first[length] = 1;
  }
  bound_records(window.record_first, window.record_end);
}

}  // namespace

std::int64_t read_window(const TokenSource& source, std::int64_t index, const WindowView& window) {
  require_alike(window);
  const auto [inputs, targets] = std::pair(window.inputs, window.targets);
  const bool rows = source.layout() != TokenLayout::stream;
  const auto length = rows ? static_cast<std::size_t>(source.row_length() - 1) : inputs.size();
  const std::int64_t begin = index * (rows ? source.row_length() : static_cast<std::int64_t>(length));
  source.read(begin, inputs.first(length));
  source.read_targets(begin + 1, targets.first(length));
  // Padding comes last, where causal attention lets no target see it.
  std::fill(inputs.begin() + static_cast<std::ptrdiff_t>(length), inputs.end(), 0);
  std::fill(targets.begin() + static_cast<std::ptrdiff_t>(length), targets.end(), -1);
  if (!window.record_first.empty()) read_records(source, begin, length, window);
  return std::count_if(targets.begin(), targets.end(), [](std::int32_t target) { return target >= 0; });
}

Permutation::Permutation(std::int64_t count, std::uint64_t seed, std::uint64_t epoch)
    : count_(static_cast<std::uint64_t>(count)), seed_(seed), epoch_(epoch) {
  while ((std::uint64_t{1} << (2 * half_bits_)) < count_) ++half_bits_;
}

std::uint64_t Permutation::once(std::uint64_t value) const noexcept {
  const std::uint64_t mask = (std::uint64_t{1} << half_bits_) - 1;
  std::uint64_t left = value >> half_bits_;
  std::uint64_t right = value & mask;
  for (std::uint32_t round = 0; round < 4; ++round) {
    // The counter names the purpose, so that no other user of the seed draws the same numbers.
    constexpr std::uint32_t purpose = 0x57494e44;
    const auto bits = numerics::philox(
        numerics::Philox128{{static_cast<std::uint32_t>(right), round, static_cast<std::uint32_t>(epoch_), purpose}},
        seed_);
    left ^= bits.word[0] & mask;
    std::swap(left, right);
  }
  return (left << half_bits_) | right;
}

std::int64_t Permutation::operator()(std::int64_t index) const noexcept {
  auto value = static_cast<std::uint64_t>(index);
  do {
    value = once(value);
  } while (value >= count_);
  return static_cast<std::int64_t>(value);
}

WindowSampler::WindowSampler(std::int64_t windows, std::uint64_t seed)
    : state_{seed, windows, 0, 0}, order_(windows, seed, 0) {
  if (windows <= 0) throw MisuseError("window sampler without windows");
}

std::int64_t WindowSampler::next() {
  if (state_.position == state_.windows) {
    state_.position = 0;
    ++state_.epoch;
    order_ = Permutation(state_.windows, state_.seed, static_cast<std::uint64_t>(state_.epoch));
  }
  return order_(state_.position++);
}

void WindowSampler::restore(const State& state) {
  if (state.seed != state_.seed || state.windows != state_.windows) {
    throw InputError("checkpoint's place in the data",
                     fmt::format("it belongs to seed {} and {} windows, this run has seed {} and {}", state.seed,
                                 state.windows, state_.seed, state_.windows),
                     "resume with the same --data, --seq-len and --seed");
  }
  if (state.epoch < 0 || state.position < 0 || state.position > state.windows) {
    throw InputError("checkpoint's place in the data", fmt::format("position {} is out of range", state.position));
  }
  state_ = state;
  order_ = Permutation(state.windows, state.seed, static_cast<std::uint64_t>(state.epoch));
}

}  // namespace tandem
