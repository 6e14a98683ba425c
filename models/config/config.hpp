#pragma once
// Description of a model: numbers from a Hugging Face config.json, or a built-in shape.
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/numerics/weight_code.hpp"
#include "models/config/lora.hpp"
#include "models/config/rope.hpp"

namespace tandem {

enum class Family : std::uint8_t { gpt2, llama };

/// RMS norms of query and key before they are rotated.
enum class QkNorm : std::uint8_t { none, per_head, whole };  // Qwen3; OLMo 2: over all heads at once

/// Activation of an MLP's gate: SiLU as in SwiGLU, or GELU as in Gemma's GeGLU.
enum class Gate : std::uint8_t { silu, gelu };

/// Kind of attention of one layer; the layers of one model may differ in it.
struct AttentionKind {
  bool rotated = true;    ///< false: knows no positions (SmolLM3)
  bool windowed = false;  ///< a token sees `ModelConfig::window` positions, itself among them
  bool operator==(const AttentionKind&) const = default;
};

/// How files spell a router and its experts.
enum class ExpertNames : std::uint8_t { mlp, block_sparse_moe };  // Mixtral's

/// More than any model has; what a file says is no reason to make room for more.
constexpr std::int64_t max_layers = std::int64_t{1} << 12;

struct ModelConfig {
  std::string name;          ///< built-in name, or the directory's
  std::string architecture;  ///< Hugging Face class: "GPT2LMHeadModel", "LlamaForCausalLM", ...
  Family family = Family::gpt2;
  std::int64_t vocabulary = 0;  ///< V
  std::int64_t positions = 0;   ///< longest sequence
  std::int64_t width = 0;       ///< C
  std::int64_t layers = 0;
  std::int64_t heads = 0;     ///< H
  std::int64_t kv_heads = 0;  ///< divides heads
  std::int64_t head_dim = 0;  ///< D; C / H unless given
  std::int64_t ffn = 0;       ///< inner width of the MLP, or of each expert
  double norm_eps = 1e-5;
  double initializer_range = 0.02;
  bool tied_head = true;
  /// Whether its files are those of a multimodal model: tensors are named accordingly, and others stand beside them.
  bool is_multimodal = false;
  // Llama family alone; GPT-2 always has biases.
  bool qkv_bias = false;  ///< Qwen2
  bool output_bias = false;
  bool mlp_bias = false;
  QkNorm qk_norm = QkNorm::none;
  Gate gate = Gate::silu;
  // Granite's; Gemma has the first and the third. factors.
  double embedding_factor = 1.0;
  double residual_factor = 1.0;             ///< factor of the outputs of attention and MLP
  std::optional<double> attention_scale{};  ///< factor of q k^T; 1 / sqrt(D) unless given
  double logits_divisor = 1.0;
  bool norm_before = true;  ///< norms before attention and MLP
  /// Norms after attention and MLP: OLMo 2, which has none before, and Gemma 3, which has both.
  bool norm_after = false;
  double norm_offset = 0.0;    ///< added to the weights of all norms: 1 in Gemma
  bool fused_tensors = false;  ///< Phi-3: files hold query, key and value in one tensor, gate and up in another
  double rope_theta = 10000.0;
  double rotated_share = 1.0;  ///< share of each head's elements that is rotated
  std::optional<RopeScaling> rope_scaling;
  bool scales_all = true;  ///< false: RoPE is not scaled in layers with a window (OLMo 3, Gemma 3)
  /// Theta in layers with a window, where it differs from rope_theta; not with scales_all.
  std::optional<double> window_theta{};
  std::vector<AttentionKind> attention;  ///< kind of each layer; empty: all rotated, none with a window
  std::int64_t window = 0;               ///< positions that a token sees in layers with a window; 0: no layer has one
  std::int64_t experts = 0;              ///< E, experts in place of one MLP; 0: none
  std::int64_t chosen_experts = 0;       ///< K, experts of each token
  bool normalized_weights = false;       ///< weights of a token's experts add up to 1
  ExpertNames expert_names = ExpertNames::mlp;
  std::optional<LoraConfig> lora{};  ///< adapters of its linear layers
  /// Format that the linear layers have in its files, as bitsandbytes wrote them: the one that takes them over as they
  /// are.
  WeightCode stored_code = WeightCode::none;
  /// Fields that training does not need and other programs may, unchanged: key of config.json ("eos_token_id") and JSON
  /// of its value.
  std::vector<std::pair<std::string, std::string>> passed_on;

  AttentionKind attention_of(std::int64_t layer) const;
  /// Positions that a token sees in a layer with a window; 0 where the layer has none.
  std::int64_t window_of(std::int64_t layer) const { return attention_of(layer).windowed ? window : 0; }
  /// Rotations of the layers with a window, or of those without.
  Rope rope(bool windowed) const {
    if (!windowed || scales_all) return {rope_theta, rope_scaling};
    return {window_theta.value_or(rope_theta), std::nullopt};
  }
  /// Elements of a head that are rotated.
  std::int64_t rotary_dim() const noexcept {
    return static_cast<std::int64_t>(static_cast<double>(head_dim) * rotated_share);
  }

  /// Rows of an MLP's values for each token.
  std::int64_t mlp_rows() const noexcept { return experts > 0 ? chosen_experts : 1; }

  /// Throws UsageError that names the field where numbers contradict each other.
  void validate() const;
};

/// Names of the built-in shapes, in a stable order.
std::vector<std::string> builtin_models();
/// Throws UsageError with the known names.
ModelConfig builtin_model(std::string_view name);

}  // namespace tandem
