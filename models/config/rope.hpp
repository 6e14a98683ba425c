#pragma once
// Rotary position embedding (Su et al., arXiv 2104.09864), and how it is stretched beyond the positions that a model
// was first trained on: the "rope_scaling" of a Hugging Face config.json, its numbers as the file gives them.
#include <cstdint>
#include <optional>
#include <variant>
#include <vector>

namespace tandem {

struct ModelConfig;

/// All rotations slower by `factor` ("linear"; Chen et al., arXiv 2306.15595).
struct LinearRopeScaling {
  double factor = 1.0;
  bool operator==(const LinearRopeScaling&) const = default;
};

/// Rotations slower beyond the model's positions alone, where no run goes ("dynamic").
struct DynamicRopeScaling {
  double factor = 1.0;
  bool operator==(const DynamicRopeScaling&) const = default;
};

/// Llama 3's: slow rotations slower, fast ones kept ("llama3").
struct Llama3RopeScaling {
  double factor = 8.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  double original_positions = 8192.0;
  bool operator==(const Llama3RopeScaling&) const = default;
};

/// Rotations of high index slower by `factor`, of low index kept, between them blended, and cosine and sine longer
/// ("yarn"; Peng et al., arXiv 2309.00071).
struct YarnRopeScaling {
  double factor = 1.0;
  double original_positions = 0.0;
  double beta_fast = 32.0;
  double beta_slow = 1.0;
  std::optional<double> attention_factor{}, mscale{}, mscale_all_dim{};
  bool truncate = true;  ///< the indices where the blend begins and ends are rounded to whole ones
  bool operator==(const YarnRopeScaling&) const = default;
};

/// A factor for each rotation, others for sequences longer than `original_positions` ("longrope"; Ding et al.,
/// arXiv 2402.13753).
struct LongRopeScaling {
  std::vector<double> short_factors, long_factors;  ///< one a pair that is rotated
  double original_positions = 0.0;
  std::optional<double> factor{};  ///< positions over original positions unless given
  std::optional<double> attention_factor{};
  bool operator==(const LongRopeScaling&) const = default;
};

using RopeScaling =
    std::variant<LinearRopeScaling, DynamicRopeScaling, Llama3RopeScaling, YarnRopeScaling, LongRopeScaling>;

/// The rotations of some layers of a model.
struct Rope {
  double theta = 10000.0;
  std::optional<RopeScaling> scaling{};
};

/// Radians per position of rotation `index`, of rotary_dim / 2, in sequences of `sequence` tokens. Computed in double.
double rope_frequency(const ModelConfig& config, const Rope& rope, std::int64_t index, std::int64_t sequence);
/// Factor of cosine and sine.
double rope_magnitude(const ModelConfig& config, const Rope& rope);
/// (sequence, rotary_dim / 2, 2): cosine and sine of each position and rotation.
std::vector<float> rope_table(const ModelConfig& config, const Rope& rope, std::int64_t sequence);

}  // namespace tandem
