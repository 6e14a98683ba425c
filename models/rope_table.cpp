#include "models/rope_table.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace tandem {
namespace {

/// Llama 3.1 stretches slow rotations by `factor`, keeps fast ones, and blends in between by how many
/// turns a rotation makes within the positions it was first trained on.
double llama3_scaled(const Llama3RopeScaling& s, double frequency) {
  const double turns = s.original_positions * frequency / (2.0 * std::numbers::pi);
  const double kept = std::clamp((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0.0, 1.0);
  return kept * frequency + (1.0 - kept) * frequency / s.factor;
}

}  // namespace

double rope_frequency(const ModelConfig& config, std::int64_t index) {
  const double exponent = 2.0 * static_cast<double>(index) / static_cast<double>(config.head_dim);
  const double frequency = std::pow(config.rope_theta, -exponent);
  return config.rope_scaling ? llama3_scaled(*config.rope_scaling, frequency) : frequency;
}

std::vector<float> rope_table(const ModelConfig& config, std::int64_t sequence) {
  const std::int64_t pairs = config.head_dim / 2;
  std::vector<double> frequencies;
  for (std::int64_t i = 0; i < pairs; ++i) frequencies.push_back(rope_frequency(config, i));
  std::vector<float> table;
  table.reserve(static_cast<std::size_t>(sequence * pairs * 2));
  for (std::int64_t t = 0; t < sequence; ++t) {
    for (const double frequency : frequencies) {
      const double angle = static_cast<double>(t) * frequency;
      table.push_back(static_cast<float>(std::cos(angle)));
      table.push_back(static_cast<float>(std::sin(angle)));
    }
  }
  return table;
}

}  // namespace tandem
