#pragma once
// Order of windows that come from several sources, each with its share of them.
#include <cstddef>
#include <cstdint>
#include <vector>

#include "data/window_sampler.hpp"

namespace tandem {

/// A source of a mix.
struct MixPart {
  std::int64_t windows = 0;
  double share = 1.0;  ///< share of all windows drawn; the shares of a mix add up to 1
};

/// Draws the source of each window at random by its share, as a function of seed and number of the draw alone, and the
/// window in the order of a WindowSampler of that source's own: a source that is used up begins its next epoch while
/// others go on. With one source the order is that of a WindowSampler.
class MixSampler {
 public:
  struct Draw {
    std::size_t source = 0;
    std::int64_t window = 0;  ///< index in that source
    bool operator==(const Draw&) const = default;
  };
  /// Place in the data: all there is to save.
  struct State {
    std::vector<WindowSampler::State> sources;
    std::int64_t drawn = 0;  ///< windows, of all sources together
    bool operator==(const State&) const = default;
  };

  /// Throws MisuseError where there is no part, or one has no window or no share.
  MixSampler(const std::vector<MixPart>& parts, std::uint64_t seed);
  /// The next window, and moves on.
  Draw next();
  State state() const;
  /// Continues from a saved state. Throws InputError where it belongs to another seed or amount of data.
  void restore(const State& state);
  const std::vector<MixPart>& parts() const noexcept { return parts_; }

 private:
  std::size_t source_of(std::int64_t draw) const noexcept;

  std::vector<MixPart> parts_;
  std::vector<WindowSampler> samplers_;
  std::uint64_t seed_;
  std::int64_t drawn_ = 0;
};

}  // namespace tandem
