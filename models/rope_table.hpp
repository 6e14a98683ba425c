#pragma once
// Angles of rotary position embedding (Su et al., arXiv 2104.09864), with Llama 3's scaling.
#include <cstdint>
#include <vector>

#include "models/config.hpp"

namespace tandem {

/// Radians per position of frequency `index` of head_dim / 2. Computed in double.
double rope_frequency(const ModelConfig& config, std::int64_t index);
/// (sequence, head_dim / 2, 2): cosine and sine of each position and frequency.
std::vector<float> rope_table(const ModelConfig& config, std::int64_t sequence);

}  // namespace tandem
