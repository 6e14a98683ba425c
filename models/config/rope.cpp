#include "models/config/rope.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "models/config/config.hpp"

namespace tandem {
namespace {

/// Position of a rotation among those of a model.
struct Rotation {
  double frequency;         ///< unscaled
  std::int64_t index;       ///< index among the rotated pairs
  std::int64_t dimensions;  ///< number of rotated dimensions
  double theta;
  std::int64_t sequence;
};

double scaled(const LinearRopeScaling& s, const Rotation& r) { return r.frequency / s.factor; }

double scaled(const DynamicRopeScaling&, const Rotation& r) { return r.frequency; }

/// Slow rotations are stretched by `factor`, fast ones kept, and those in between blended by how many turns they make
/// within the positions first trained on.
double scaled(const Llama3RopeScaling& s, const Rotation& r) {
  const double turns = s.original_positions * r.frequency / (2.0 * std::numbers::pi);
  const double kept = std::clamp((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0.0, 1.0);
  return kept * r.frequency + (1.0 - kept) * r.frequency / s.factor;
}

/// The index, as a fraction, of the rotation that makes so many turns within the positions first trained on.
double index_of_turns(const YarnRopeScaling& s, const Rotation& r, double turns) {
  return static_cast<double>(r.dimensions) * std::log(s.original_positions / (turns * 2.0 * std::numbers::pi)) /
         (2.0 * std::log(r.theta));
}

double scaled(const YarnRopeScaling& s, const Rotation& r) {
  double first = index_of_turns(s, r, s.beta_fast), last = index_of_turns(s, r, s.beta_slow);
  if (s.truncate) {
    first = std::floor(first);
    last = std::ceil(last);
  }
  first = std::max(first, 0.0);
  last = std::min(last, static_cast<double>(r.dimensions - 1));
  if (first == last) last += 0.001;  // a step, as transformers has it
  const double stretched = std::clamp((static_cast<double>(r.index) - first) / (last - first), 0.0, 1.0);
  return stretched * r.frequency / s.factor + (1.0 - stretched) * r.frequency;
}

double scaled(const LongRopeScaling& s, const Rotation& r) {
  const bool beyond = static_cast<double>(r.sequence) > s.original_positions;
  return r.frequency / (beyond ? s.long_factors : s.short_factors).at(static_cast<std::size_t>(r.index));
}

template <class Scaling>
double magnitude(const Scaling&, const ModelConfig&) {
  return 1.0;
}

/// 0.1 m ln(s) + 1 (Peng et al., eq. 22), or what it is of one m over that of another.
double magnitude(const YarnRopeScaling& s, const ModelConfig&) {
  if (s.attention_factor) return *s.attention_factor;
  const auto of = [&](double m) { return s.factor <= 1.0 ? 1.0 : 0.1 * m * std::log(s.factor) + 1.0; };
  const bool both = s.mscale.value_or(0.0) != 0.0 && s.mscale_all_dim.value_or(0.0) != 0.0;
  return both ? of(*s.mscale) / of(*s.mscale_all_dim) : of(1.0);
}

double magnitude(const LongRopeScaling& s, const ModelConfig& config) {
  if (s.attention_factor) return *s.attention_factor;
  const double factor = s.factor.value_or(static_cast<double>(config.positions) / s.original_positions);
  return factor <= 1.0 ? 1.0 : std::sqrt(1.0 + std::log(factor) / std::log(s.original_positions));
}

}  // namespace

double rope_frequency(const ModelConfig& config, const Rope& rope, std::int64_t index, std::int64_t sequence) {
  const std::int64_t dimensions = config.rotary_dim();
  const double exponent = 2.0 * static_cast<double>(index) / static_cast<double>(dimensions);
  const double frequency = std::pow(rope.theta, -exponent);
  if (!rope.scaling) return frequency;
  const Rotation rotation{frequency, index, dimensions, rope.theta, sequence};
  return std::visit([&](const auto& s) { return scaled(s, rotation); }, *rope.scaling);
}

double rope_magnitude(const ModelConfig& config, const Rope& rope) {
  return rope.scaling ? std::visit([&](const auto& s) { return magnitude(s, config); }, *rope.scaling) : 1.0;
}

std::vector<float> rope_table(const ModelConfig& config, const Rope& rope, std::int64_t sequence) {
  const std::int64_t pairs = config.rotary_dim() / 2;
  const double magnitude = rope_magnitude(config, rope);
  std::vector<double> frequencies;
  for (std::int64_t i = 0; i < pairs; ++i) frequencies.push_back(rope_frequency(config, rope, i, sequence));
  std::vector<float> table;
  table.reserve(static_cast<std::size_t>(sequence * pairs * 2));
  for (std::int64_t t = 0; t < sequence; ++t) {
    for (const double frequency : frequencies) {
      const double angle = static_cast<double>(t) * frequency;
      table.push_back(static_cast<float>(magnitude * std::cos(angle)));
      table.push_back(static_cast<float>(magnitude * std::sin(angle)));
    }
  }
  return table;
}

}  // namespace tandem
