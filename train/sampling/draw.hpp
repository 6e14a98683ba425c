#pragma once
// The next token of a sequence, from its logits.
#include <cstdint>
#include <span>

namespace tandem {

struct DrawOptions {
  double temperature = 0.8;         ///< 0: always the likeliest token
  std::int64_t top_k = 0;           ///< draw from the k likeliest; 0: from all
  double top_p = 1.0;               ///< draw from the likeliest that together have at least this share; 1: from all
  double repetition_penalty = 1.0;  ///< logits of tokens that the sequence has: divided by it where positive, else
                                    ///< multiplied; 1: none
  std::uint64_t seed = 42;
};

/// Number of a draw; with the seed it decides where the draw falls.
struct DrawNumber {
  std::uint64_t token = 0;   ///< among the new tokens of its sequence
  std::uint64_t repeat = 0;  ///< among sequences that begin with the same prompt
};

/// One token from logits. Of equal logits the first token counts as likelier. Penalty, temperature, top_k and top_p
/// apply in this order, as in transformers. `sequence`: its tokens so far. Throws InputError where the logits are not
/// finite.
std::int32_t draw_token(std::span<const float> logits, std::span<const std::int32_t> sequence,
                        const DrawOptions& options, const DrawNumber& number);

}  // namespace tandem
