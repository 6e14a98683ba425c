#include "data/mix_sampler.hpp"

#include <fmt/format.h>

#include <utility>

#include "core/base/error.hpp"
#include "core/numerics/random.hpp"

namespace tandem {
namespace {

/// Sources of equal size have orders of their own; that of the first is the order without a mix.
std::uint64_t seed_of_source(std::uint64_t seed, std::size_t source) noexcept {
  constexpr std::uint64_t apart = 0x9e3779b97f4a7c15;
  return seed + static_cast<std::uint64_t>(source) * apart;
}

}  // namespace

MixSampler::MixSampler(const std::vector<MixPart>& parts, std::uint64_t seed) : parts_(parts), seed_(seed) {
  if (parts.empty()) throw MisuseError("mix sampler without sources");
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (!(parts[i].share > 0.0)) throw MisuseError("mix sampler with a source that has no share");
    samplers_.emplace_back(parts[i].windows, seed_of_source(seed, i));
  }
}

std::size_t MixSampler::source_of(std::int64_t draw) const noexcept {
  // The counter names the purpose, so that no other user of the seed draws the same numbers.
  constexpr std::uint32_t purpose = 0x4d495853;
  const auto number = static_cast<std::uint64_t>(draw);
  const auto bits = numerics::philox(
      numerics::Philox128{{static_cast<std::uint32_t>(number), static_cast<std::uint32_t>(number >> 32U), 0, purpose}},
      seed_);
  constexpr double unit = 0x1p-32;
  double left = (static_cast<double>(bits.word[0]) + static_cast<double>(bits.word[1]) * unit) * unit;  // in [0, 1]
  for (std::size_t i = 0; i + 1 < parts_.size(); ++i) {
    left -= parts_[i].share;
    if (left < 0.0) return i;
  }
  return parts_.size() - 1;
}

MixSampler::Draw MixSampler::next() {
  const std::size_t source = parts_.size() == 1 ? 0 : source_of(drawn_);
  ++drawn_;
  return {source, samplers_[source].next()};
}

MixSampler::State MixSampler::state() const {
  State state{.sources{}, .drawn = drawn_};
  for (const WindowSampler& sampler : samplers_) {
    state.sources.push_back(sampler.state());
    state.sources.back().seed = seed_;
  }
  return state;
}

void MixSampler::restore(const State& state) {
  if (state.sources.size() != samplers_.size()) {
    throw InputError(
        "checkpoint's place in the data",
        fmt::format("it belongs to {} sources of data, this run has {}", state.sources.size(), samplers_.size()),
        "resume with the same --data or --mix");
  }
  std::vector<WindowSampler> samplers = samplers_;
  std::uint64_t drawn = 0;  // unsigned: a checkpoint is not believed
  for (std::size_t i = 0; i < samplers.size(); ++i) {
    WindowSampler::State source = state.sources[i];
    source.seed = seed_of_source(source.seed, i);  // all of a checkpoint have its one seed
    samplers[i].restore(source);
    drawn += static_cast<std::uint64_t>(source.epoch) * static_cast<std::uint64_t>(source.windows) +
             static_cast<std::uint64_t>(source.position);
  }
  if (state.drawn < 0 || drawn != static_cast<std::uint64_t>(state.drawn)) {
    throw InputError("checkpoint's place in the data",
                     fmt::format("its sources have given {} windows, {} were drawn", drawn, state.drawn));
  }
  samplers_ = std::move(samplers);
  drawn_ = state.drawn;
}

}  // namespace tandem
