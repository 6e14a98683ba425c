#pragma once
// Text out of a model, token by token.
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "train/runtime/loaded_model.hpp"

namespace tandem {

struct SampleOptions {
  std::int64_t max_tokens = 100;
  double temperature = 0.8;  ///< 0: always the likeliest token
  std::int64_t top_k = 0;    ///< draw from the k likeliest; 0: from all
  std::uint64_t seed = 42;
};

/// One token from logits: `index` is its place in the sequence, which with the seed decides the draw.
std::int32_t draw_token(std::span<const float> logits, const SampleOptions& options, std::uint64_t index);

/// Continues `prompt` (not empty). Past the model's sequence the oldest tokens are forgotten. `each` gets
/// every new token as it comes. Blocks.
std::vector<std::int32_t> sample_tokens(LoadedModel& model, const RunSetup& setup, std::vector<std::int32_t> prompt,
                                        const SampleOptions& options, const std::function<void(std::int32_t)>& each);

/// Bytes as text: valid UTF-8 as it is, other bytes and control characters (but newline and tab) as \xNN.
std::string text_of_bytes(std::span<const std::int32_t> tokens);

}  // namespace tandem
