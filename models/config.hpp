#pragma once
// What a model is: numbers from a Hugging Face config.json, or a built-in shape.
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tandem {

enum class Family : std::uint8_t { gpt2, llama };

/// Llama 3's frequency-dependent RoPE scaling ("rope_type": "llama3").
struct Llama3RopeScaling {
  double factor = 8.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  double original_positions = 8192.0;
};

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
  std::int64_t ffn = 0;       ///< inner width of the MLP
  double norm_eps = 1e-5;
  double initializer_range = 0.02;
  bool tied_head = true;
  bool qkv_bias = false;  ///< Qwen2; GPT-2 always has biases
  bool qk_norm = false;   ///< Qwen3
  double rope_theta = 10000.0;
  std::optional<Llama3RopeScaling> rope_scaling;
  /// What generation needs and training does not, passed on as it came: key of config.json ("eos_token_id") and
  /// JSON of its value.
  std::vector<std::pair<std::string, std::string>> special_tokens;

  /// Throws UsageError that names the field where numbers contradict each other.
  void validate() const;
};

/// Names of the built-in shapes, in a stable order.
std::vector<std::string> builtin_models();
/// Throws UsageError with the known names.
ModelConfig builtin_model(std::string_view name);
/// Reads a Hugging Face config.json as transformers 4 and 5 write it. What tandem does not compute (an
/// unknown architecture or activation, a sliding window shorter than the positions, experts) is refused
/// by name. Throws UsageError.
ModelConfig read_hf_config(const std::filesystem::path& config_json);
/// The same of its text; `name` becomes the model's name and stands in messages.
ModelConfig parse_hf_config(std::string_view text, const std::string& name);
/// The config.json that transformers would read back as this model, pretty-printed.
std::string hf_config_text(const ModelConfig& config, std::string_view torch_dtype);

}  // namespace tandem
