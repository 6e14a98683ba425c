#pragma once
// Order of the windows of the data. In a stream, window i of length L feeds tokens [iL, iL + L) and
// predicts [iL + 1, iL + L + 1); an incomplete last one is dropped. In rows, also packed ones, window i is row i: its
// tokens but the last are fed, those but the first predicted, and what is left of L is padding that is no target.
#include <cstdint>
#include <span>

#include "data/token_source.hpp"

namespace tandem {

/// Windows of `length` in `tokens` tokens of a stream.
std::int64_t window_count(std::int64_t tokens, std::int64_t length) noexcept;
/// Windows of a source. Throws InputError, which calls it `name`, where it is shorter than one, or its rows are longer.
std::int64_t require_windows(const TokenSource& source, std::int64_t length, std::string_view name = "data");

/// Room for one window, `length` values each.
struct WindowView {
  std::span<std::int32_t> inputs;
  std::span<std::int32_t> targets;  ///< -1 where there is none
  /// Position in the window of the first input of each input's record, and one past that of its last; both or neither
  /// (empty).
  std::span<std::int32_t> record_first{};
  std::span<std::int32_t> record_end{};
};

/// Fills the view with window `index`, and returns how many targets there are. Records are cut at the ends of the
/// window, and padding of the data or of the window is a record of its own. Of data that is not bounded the whole
/// window is one record. Throws as TokenSource::read, and MisuseError where the spans differ in length.
std::int64_t read_window(const TokenSource& source, std::int64_t index, const WindowView& window);

/// A permutation of [0, count) as a function of key and epoch alone: a Feistel network over the next power
/// of four, walked until it lands inside. Needs no memory, and any element can be asked for alone.
class Permutation {
 public:
  Permutation(std::int64_t count, std::uint64_t seed, std::uint64_t epoch);
  std::int64_t operator()(std::int64_t index) const noexcept;

 private:
  std::uint64_t once(std::uint64_t value) const noexcept;
  std::uint64_t count_;
  std::uint64_t seed_;
  std::uint64_t epoch_;
  int half_bits_ = 1;
};

/// Each epoch visits every window once, in an order that depends on seed and epoch alone.
class WindowSampler {
 public:
  /// Position of the sampler: all there is to save.
  struct State {
    std::uint64_t seed = 0;
    std::int64_t windows = 0;
    std::int64_t epoch = 0;
    std::int64_t position = 0;  ///< windows of this epoch already given
    bool operator==(const State&) const = default;
  };

  /// Throws MisuseError where `windows` is not positive.
  WindowSampler(std::int64_t windows, std::uint64_t seed);
  /// The next window, and moves on.
  std::int64_t next();
  const State& state() const noexcept { return state_; }
  /// Continues from a saved state. Throws InputError where it belongs to another seed or amount of data.
  void restore(const State& state);

 private:
  State state_;
  Permutation order_;
};

}  // namespace tandem
