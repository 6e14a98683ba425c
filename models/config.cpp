#include "models/config.hpp"

#include <fmt/format.h>

#include <cmath>

#include "core/error.hpp"

namespace tandem {
namespace {

// Bounds far above any model that exists, low enough that no product of the shapes overflows 64 bits.
constexpr std::int64_t max_vocabulary = std::int64_t{1} << 24;
constexpr std::int64_t max_positions = std::int64_t{1} << 24;
constexpr std::int64_t max_width = std::int64_t{1} << 20;
constexpr std::int64_t max_layers = std::int64_t{1} << 12;
constexpr std::int64_t max_heads = std::int64_t{1} << 12;
constexpr std::int64_t max_head_dim = std::int64_t{1} << 12;
constexpr std::int64_t max_ffn = std::int64_t{1} << 22;

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
  if (c.family == Family::llama) {
    if (c.head_dim % 2 != 0) refuse(c, fmt::format("the head dimension is {}, rotation needs pairs", c.head_dim));
    return;
  }
  if (c.heads * c.head_dim != c.width) {
    refuse(c, fmt::format("{} heads of {} do not make up the width {}", c.heads, c.head_dim, c.width));
  }
  if (c.kv_heads != c.heads) refuse(c, "GPT-2 has as many key/value heads as heads");
}

void check_rope(const ModelConfig& c) {
  check_number(c, "rope_theta", c.rope_theta, 1.0, 1e15);
  if (!c.rope_scaling) return;
  const Llama3RopeScaling& s = *c.rope_scaling;
  check_number(c, "the RoPE scaling's factor", s.factor, 1.0, 1e6);
  check_number(c, "the RoPE scaling's low_freq_factor", s.low_freq_factor, 1e-6, 1e6);
  check_number(c, "the RoPE scaling's high_freq_factor", s.high_freq_factor, 1e-6, 1e6);
  check_number(c, "the RoPE scaling's original_max_position_embeddings", s.original_positions, 1.0, 1e9);
  if (s.high_freq_factor <= s.low_freq_factor) {
    refuse(c, "the RoPE scaling's high_freq_factor is not above its low_freq_factor");
  }
}

}  // namespace

void ModelConfig::validate() const {
  check_sizes(*this);
  check_heads(*this);
  check_number(*this, "the norm's epsilon", norm_eps, 1e-30, 1.0);
  check_number(*this, "initializer_range", initializer_range, 0.0, 100.0);
  if (family == Family::llama) check_rope(*this);
  if (family == Family::gpt2 && (qk_norm || rope_scaling)) refuse(*this, "GPT-2 has neither QK norm nor RoPE");
}

}  // namespace tandem
