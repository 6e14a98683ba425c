#include "models/config/config.hpp"

#include <fmt/format.h>

#include <cmath>
#include <span>

#include "core/base/error.hpp"

namespace tandem {
namespace {

// Bounds far above any model that exists, low enough that no product of the shapes overflows 64 bits.
constexpr std::int64_t max_vocabulary = std::int64_t{1} << 24;
constexpr std::int64_t max_positions = std::int64_t{1} << 24;
constexpr std::int64_t max_width = std::int64_t{1} << 20;
constexpr std::int64_t max_heads = std::int64_t{1} << 12;
constexpr std::int64_t max_head_dim = std::int64_t{1} << 12;
constexpr std::int64_t max_ffn = std::int64_t{1} << 22;
constexpr std::int64_t max_experts = std::int64_t{1} << 12;

[[noreturn]] void refuse(const ModelConfig& c, std::string_view why) {
  throw UsageError(fmt::format("model {}", c.name.empty() ? "description" : c.name), why);
}

void check_size(const ModelConfig& c, std::string_view field, std::int64_t value, std::int64_t highest) {
  if (value < 1 || value > highest) {
    refuse(c, fmt::format("{} is {}, expected 1 to {}", field, value, highest));
  }
}

void check_number(const ModelConfig& c, std::string_view field, double value, double lowest, double highest) {
  if (!(value >= lowest && value <= highest)) {
    refuse(c, fmt::format("{} is {}, expected {} to {}", field, value, lowest, highest));
  }
}

void check_sizes(const ModelConfig& c) {
  check_size(c, "the vocabulary", c.vocabulary, max_vocabulary);
  check_size(c, "the number of positions", c.positions, max_positions);
  check_size(c, "the width", c.width, max_width);
  check_size(c, "the number of layers", c.layers, max_layers);
  check_size(c, "the number of heads", c.heads, max_heads);
  check_size(c, "the number of key/value heads", c.kv_heads, max_heads);
  check_size(c, "the head dimension", c.head_dim, max_head_dim);
  check_size(c, "the inner width", c.ffn, max_ffn);
  check_size(c, "heads times head dimension", c.heads * c.head_dim, max_width);
}

void check_heads(const ModelConfig& c) {
  if (c.heads % c.kv_heads != 0) {
    refuse(c, fmt::format("{} heads do not divide among {} key/value heads", c.heads, c.kv_heads));
  }
  if (c.family == Family::llama) return;
  if (c.heads * c.head_dim != c.width) {
    refuse(c, fmt::format("{} heads of {} do not make up the width {}", c.heads, c.head_dim, c.width));
  }
  if (c.kv_heads != c.heads) refuse(c, "GPT-2 has as many key/value heads as heads");
}

constexpr double max_factor = 1e6;
constexpr double max_trained_positions = 1e9;

void check_factor(const ModelConfig& c, double factor) {
  check_number(c, "the RoPE scaling's factor", factor, 1.0, max_factor);
}

void check(const ModelConfig& c, const LinearRopeScaling& s) { check_factor(c, s.factor); }

void check(const ModelConfig& c, const DynamicRopeScaling& s) { check_factor(c, s.factor); }

void check(const ModelConfig& c, const Llama3RopeScaling& s) {
  check_factor(c, s.factor);
  check_number(c, "the RoPE scaling's low_freq_factor", s.low_freq_factor, 1e-6, max_factor);
  check_number(c, "the RoPE scaling's high_freq_factor", s.high_freq_factor, 1e-6, max_factor);
  check_number(c, "the RoPE scaling's original_max_position_embeddings", s.original_positions, 1.0,
               max_trained_positions);
  if (s.high_freq_factor <= s.low_freq_factor) {
    refuse(c, "the RoPE scaling's high_freq_factor is not above its low_freq_factor");
  }
}

void check(const ModelConfig& c, const YarnRopeScaling& s) {
  check_factor(c, s.factor);
  check_number(c, "the RoPE scaling's beta_slow", s.beta_slow, 1e-6, max_factor);
  check_number(c, "the RoPE scaling's beta_fast", s.beta_fast, s.beta_slow, max_factor);
  check_number(c, "the RoPE scaling's attention_factor", s.attention_factor.value_or(1.0), 1e-6, max_factor);
  check_number(c, "the RoPE scaling's mscale", s.mscale.value_or(0.0), 0.0, max_factor);
  check_number(c, "the RoPE scaling's mscale_all_dim", s.mscale_all_dim.value_or(0.0), 0.0, max_factor);
  check_number(c, "the RoPE scaling's original_max_position_embeddings", s.original_positions, 1.0,
               max_trained_positions);
  if (c.rope_theta <= 1.0) refuse(c, "rope_theta is 1, of which YaRN takes the logarithm");
}

void check_factors(const ModelConfig& c, std::string_view field, std::span<const double> factors) {
  const auto pairs = static_cast<std::size_t>(c.rotary_dim() / 2);
  if (factors.size() != pairs) {
    refuse(c, fmt::format("the RoPE scaling's {} has {} values, expected {}, half of what is rotated of a head", field,
                          factors.size(), pairs));
  }
  for (const double factor : factors) {
    check_number(c, fmt::format("a value of the RoPE scaling's {}", field), factor, 1e-6, max_factor);
  }
}

void check(const ModelConfig& c, const LongRopeScaling& s) {
  check_factors(c, "short_factor", s.short_factors);
  check_factors(c, "long_factor", s.long_factors);
  check_number(c, "the RoPE scaling's factor", s.factor.value_or(1.0), 1e-6, max_factor);
  check_number(c, "the RoPE scaling's attention_factor", s.attention_factor.value_or(1.0), 1e-6, max_factor);
  check_number(c, "the RoPE scaling's original_max_position_embeddings", s.original_positions, 2.0,
               max_trained_positions);
}

void check_rope(const ModelConfig& c) {
  check_number(c, "rope_theta", c.rope_theta, 1.0, 1e15);
  check_number(c, "the rope_theta of layers with a window", c.window_theta.value_or(1.0), 1.0, 1e15);
  check_number(c, "partial_rotary_factor", c.rotated_share, 0.0, 1.0);
  if (c.rotary_dim() < 2 || c.rotary_dim() % 2 != 0) {
    refuse(c, fmt::format("{} of the {} elements of a head are rotated, rotation needs pairs", c.rotary_dim(),
                          c.head_dim));
  }
  if (c.rope_scaling) std::visit([&](const auto& scaling) { check(c, scaling); }, *c.rope_scaling);
}

void check_attention(const ModelConfig& c) {
  if (!c.attention.empty() && static_cast<std::int64_t>(c.attention.size()) != c.layers) {
    refuse(c, fmt::format("kinds of attention are given for {} of {} layers", c.attention.size(), c.layers));
  }
  bool windowed = false;
  for (const AttentionKind& kind : c.attention) windowed = windowed || kind.windowed;
  if (windowed) check_size(c, "the sliding window", c.window, max_positions);
}

void check_factors(const ModelConfig& c) {
  constexpr double least = 1e-6, most = 1e6;
  check_number(c, "the embedding's factor", c.embedding_factor, least, most);
  check_number(c, "the residual factor", c.residual_factor, least, most);
  check_number(c, "attention's scale", c.attention_scale.value_or(1.0), least, most);
  check_number(c, "the logits' divisor", c.logits_divisor, least, most);
  if (!c.norm_before && !c.norm_after) refuse(c, "it has norms neither before nor after attention and MLP");
  if (c.norm_after && c.residual_factor != 1.0) refuse(c, "a residual factor beside norms after attention and MLP");
}

void check_experts(const ModelConfig& c) {
  if (c.experts == 0) return;
  check_size(c, "the number of experts", c.experts, max_experts);
  check_size(c, "the inner width of all experts", c.ffn * c.experts, max_ffn);
  check_size(c, "the number of experts that a token takes", c.chosen_experts, c.experts);
  if (c.mlp_bias) refuse(c, "experts have no biases");
  if (c.gate != Gate::silu) refuse(c, "experts have no other activation than SwiGLU");
}

}  // namespace

AttentionKind ModelConfig::attention_of(std::int64_t layer) const {
  return attention.empty() ? AttentionKind{} : attention.at(static_cast<std::size_t>(layer));
}

void ModelConfig::validate() const {
  check_sizes(*this);
  check_heads(*this);
  check_number(*this, "the norm's epsilon", norm_eps, 1e-30, 1.0);
  check_number(*this, "initializer_range", initializer_range, 0.0, 100.0);
  if (family == Family::llama) {
    check_rope(*this);
    check_attention(*this);
    check_factors(*this);
    check_experts(*this);
  } else if (qk_norm != QkNorm::none || rope_scaling || experts != 0) {
    refuse(*this, "GPT-2 has neither QK norm nor RoPE nor experts");
  }
}

}  // namespace tandem
