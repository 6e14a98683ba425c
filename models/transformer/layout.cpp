// Parameters of a model, and their names in Hugging Face's files. Blocks use the Hugging Face names within a block, so
// that the mapping is a prefix.
#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "models/transformer/adapter_modules.hpp"
#include "models/transformer/transformer.hpp"

namespace tandem {
namespace {

constexpr ParameterOptions vector_options{.decay = false};

void add_gpt2_block(ParameterLayout::LayerBuilder layer, const ModelConfig& c, ParameterOptions product) {
  layer.add("ln_1.weight", {c.width}, vector_options)
      .add("ln_1.bias", {c.width}, vector_options)
      .add("attn.c_attn.weight", {3 * c.width, c.width}, product)
      .add("attn.c_attn.bias", {3 * c.width}, vector_options)
      .add("attn.c_proj.weight", {c.width, c.width}, product)
      .add("attn.c_proj.bias", {c.width}, vector_options)
      .add("ln_2.weight", {c.width}, vector_options)
      .add("ln_2.bias", {c.width}, vector_options)
      .add("mlp.c_fc.weight", {c.ffn, c.width}, product)
      .add("mlp.c_fc.bias", {c.ffn}, vector_options)
      .add("mlp.c_proj.weight", {c.width, c.ffn}, product)
      .add("mlp.c_proj.bias", {c.width}, vector_options);
}

void add_linear(ParameterLayout::LayerBuilder& layer, const std::string& name, std::int64_t outputs,
                std::int64_t inputs, bool bias, ParameterOptions product) {
  layer.add(name + ".weight", {outputs, inputs}, product);
  if (bias) layer.add(name + ".bias", {outputs}, vector_options);
}

void add_llama_attention(ParameterLayout::LayerBuilder& layer, const ModelConfig& c, ParameterOptions product) {
  const std::int64_t query = c.heads * c.head_dim;
  const std::int64_t key = c.kv_heads * c.head_dim;
  add_linear(layer, "self_attn.q_proj", query, c.width, c.qkv_bias, product);
  add_linear(layer, "self_attn.k_proj", key, c.width, c.qkv_bias, product);
  add_linear(layer, "self_attn.v_proj", key, c.width, c.qkv_bias, product);
  if (c.qk_norm != QkNorm::none) {
    const bool whole = c.qk_norm == QkNorm::whole;
    layer.add("self_attn.q_norm.weight", {whole ? query : c.head_dim}, vector_options);
    layer.add("self_attn.k_norm.weight", {whole ? key : c.head_dim}, vector_options);
  }
  add_linear(layer, "self_attn.o_proj", c.width, query, c.output_bias, product);
}

void add_llama_mlp(ParameterLayout::LayerBuilder& layer, const ModelConfig& c, ParameterOptions product) {
  if (c.experts > 0) {
    layer.add("mlp.gate.weight", {c.experts, c.width}, product)
        .add("mlp.experts.gate_proj.weight", {c.experts, c.ffn, c.width}, product)
        .add("mlp.experts.up_proj.weight", {c.experts, c.ffn, c.width}, product)
        .add("mlp.experts.down_proj.weight", {c.experts, c.width, c.ffn}, product);
    return;
  }
  add_linear(layer, "mlp.gate_proj", c.ffn, c.width, c.mlp_bias, product);
  add_linear(layer, "mlp.up_proj", c.ffn, c.width, c.mlp_bias, product);
  add_linear(layer, "mlp.down_proj", c.width, c.ffn, c.mlp_bias, product);
}

void add_llama_block(ParameterLayout::LayerBuilder layer, const ModelConfig& c, ParameterOptions product) {
  if (c.norm_before) layer.add("input_layernorm.weight", {c.width}, vector_options);
  add_llama_attention(layer, c, product);
  layer.add("post_attention_layernorm.weight", {c.width}, vector_options);  // before the MLP, or else after attention
  if (c.norm_before && c.norm_after) layer.add("pre_feedforward_layernorm.weight", {c.width}, vector_options);
  add_llama_mlp(layer, c, product);
  if (c.norm_after) layer.add("post_feedforward_layernorm.weight", {c.width}, vector_options);
}

void add_adapters(ParameterLayout::LayerBuilder layer, const ModelConfig& c, std::int64_t block,
                  ParameterOptions product) {
  if (!c.lora) return;
  for (const AdapterModule& module : adapter_modules(c)) {
    const LoraModule* const lora = c.lora->find(block, module.name);
    if (lora == nullptr) continue;
    const auto shape = [&](std::int64_t columns) {
      return module.experts() > 0 ? Shape{module.experts(), lora->rank, columns} : Shape{lora->rank, columns};
    };
    layer.add(a_of(module), shape(module.inputs()), product);
    for (const LinearLayer& of : module.layers) layer.add(b_of(of), shape(of.outputs), product);
  }
}

/// Tokens of which the gradients of all logits take no more than a gradient of their weight in bf16 saves: of a
/// vocabulary of V a buffer in bf16 takes 2 V C bytes less, and the gradients of N rows of logits in bf16 2 N V.
std::int64_t few_tokens(const ModelConfig& config, const RunShape& shape) {
  return 2 * config.width / static_cast<std::int64_t>(size_of(shape.compute));
}

std::string block_name(std::int64_t index) { return fmt::format("block.{}", index); }

/// GPT-2 keeps its weights as (I, O), after the 1x1 convolution that they once were.
bool is_conv1d(std::string_view name) {
  return name == "attn.c_attn.weight" || name == "attn.c_proj.weight" || name == "mlp.c_fc.weight" ||
         name == "mlp.c_proj.weight";
}

HfTensor gpt2_tensor(const ModelConfig& c, const Parameter& p) {
  if (p.layer == 0) return {p.name == "tokens" ? "transformer.wte.weight" : "transformer.wpe.weight"};
  if (p.layer <= c.layers) return {fmt::format("transformer.h.{}.{}", p.layer - 1, p.name), is_conv1d(p.name)};
  if (p.name == "lm_head") return {"lm_head.weight"};
  return {p.name == "norm.weight" ? "transformer.ln_f.weight" : "transformer.ln_f.bias"};
}

/// The projections that Phi-3's files hold in one tensor, in the order in which they lie there.
struct FusedTensor {
  std::string_view name;
  std::vector<std::pair<std::string_view, std::int64_t>> parts;  ///< each parameter's name and rows
};

std::vector<FusedTensor> fused_tensors(const ModelConfig& c) {
  const std::int64_t query = c.heads * c.head_dim, key = c.kv_heads * c.head_dim;
  return {{"self_attn.qkv_proj.weight",
           {{"self_attn.q_proj.weight", query}, {"self_attn.k_proj.weight", key}, {"self_attn.v_proj.weight", key}}},
          {"mlp.gate_up_proj.weight", {{"mlp.gate_proj.weight", c.ffn}, {"mlp.up_proj.weight", c.ffn}}}};
}

HfTensor fused_tensor(const ModelConfig& c, const Parameter& p) {
  for (const FusedTensor& tensor : fused_tensors(c)) {
    HfTensor found;
    for (const auto& [part, rows] : tensor.parts) {
      if (part == p.name) {
        found.name = tensor.name;
        found.first_row = found.rows;
      }
      found.rows += rows;
    }
    if (!found.name.empty()) return found;
  }
  return {.name = p.name};
}

/// "mlp.experts.7.up_proj.weight" of "mlp.experts.up_proj.weight", or as Mixtral's files have it.
HfTensor expert_tensor(const ModelConfig& c, const Parameter& p, std::int64_t index) {
  const bool mixtral = c.expert_names == ExpertNames::block_sparse_moe;
  std::string_view part = p.name;
  part.remove_prefix(std::string_view("mlp.").size());
  if (const std::string_view experts = "experts."; part.starts_with(experts)) {
    part.remove_prefix(experts.size());
    const char* const name = part.starts_with("gate") ? "w1" : part.starts_with("down") ? "w2" : "w3";
    if (mixtral) return {fmt::format("block_sparse_moe.experts.{}.{}.weight", index, name)};
    return {fmt::format("mlp.experts.{}.{}", index, part)};
  }
  return {fmt::format("{}.{}", mixtral ? "block_sparse_moe" : "mlp", part)};
}

HfTensor tensor_in_block(const ModelConfig& c, const Parameter& p, std::int64_t index) {
  if (c.experts > 0 && p.name.starts_with("mlp.")) return expert_tensor(c, p, index);
  return c.fused_tensors ? fused_tensor(c, p) : HfTensor{.name = p.name};
}

HfTensor block_tensor(const ModelConfig& c, const Parameter& p, std::int64_t index) {
  HfTensor tensor = tensor_in_block(c, p, index);
  tensor.name = fmt::format("model.layers.{}.{}", p.layer - 1, tensor.name);
  return tensor;
}

HfTensor llama_tensor(const ModelConfig& c, const Parameter& p, std::int64_t index) {
  if (p.layer == 0) return {"model.embed_tokens.weight"};
  if (p.layer <= c.layers) return block_tensor(c, p, index);
  return {p.name == "lm_head" ? "lm_head.weight" : "model.norm.weight"};
}

}  // namespace

std::vector<LinearLayer> linear_layers(const ModelConfig& c) {
  const std::int64_t query = c.heads * c.head_dim, key = c.kv_heads * c.head_dim;
  if (c.family == Family::gpt2) {
    return {{"attn.c_attn", 3 * c.width, c.width},
            {"attn.c_proj", c.width, c.width},
            {"mlp.c_fc", c.ffn, c.width},
            {"mlp.c_proj", c.width, c.ffn}};
  }
  const std::string mlp = c.experts > 0 ? "mlp.experts." : "mlp.";
  return {{"self_attn.q_proj", query, c.width},
          {"self_attn.k_proj", key, c.width},
          {"self_attn.v_proj", key, c.width},
          {"self_attn.o_proj", c.width, query},
          {mlp + "gate_proj", c.ffn, c.width, c.experts},
          {mlp + "up_proj", c.ffn, c.width, c.experts},
          {mlp + "down_proj", c.width, c.ffn, c.experts}};
}

ParameterLayout layout_of(const ModelConfig& config, DType products, DType ends) {
  config.validate();
  const ParameterOptions table{.gradient = ends};
  const bool gpt2 = config.family == Family::gpt2;
  ParameterLayout layout;
  auto embedding = layout.add_layer("embedding");
  embedding.add("tokens", {config.vocabulary, config.width}, table);
  if (gpt2) embedding.add("positions", {config.positions, config.width});
  for (std::int64_t i = 0; i < config.layers; ++i) {
    const auto block = layout.add_layer(block_name(i));
    (gpt2 ? add_gpt2_block : add_llama_block)(block, config, {.gradient = products});
    add_adapters(block, config, i, {.gradient = products});
  }
  auto head = layout.add_layer("head");
  head.add("norm.weight", {config.width}, vector_options);
  if (gpt2) head.add("norm.bias", {config.width}, vector_options);
  head.add("lm_head", {config.vocabulary, config.width}, table);
  if (config.tied_head) layout.tie("embedding.tokens", "head.lm_head");
  return layout;
}

DType ends_gradient(const ModelConfig& config, const RunShape& shape) noexcept {
  // Smaller micro-batches take less memory where a sequence is not too long for that.
  const bool too_long = shape.sequence > few_tokens(config, shape);
  const bool whole = too_long ? !config.tied_head : shape.batch <= few_tokens(config, shape) / shape.sequence;
  return whole ? DType::bf16 : DType::f32;  // B T could overflow: not every shape has been checked yet
}

std::int64_t head_rows_at_once(const ModelConfig& config, const RunShape& shape) noexcept {
  constexpr std::int64_t least = std::int64_t{16} << 20, most = std::int64_t{256} << 20, multiple = 64;
  const std::int64_t tokens = shape.batch * shape.sequence;
  if (tokens <= few_tokens(config, shape)) return config.vocabulary;
  const std::int64_t of_row = tokens * static_cast<std::int64_t>(size_of(shape.compute));
  const std::int64_t bytes = std::clamp(config.vocabulary * config.width, least, most);
  return std::min(config.vocabulary, std::max<std::int64_t>(1, bytes / of_row / multiple) * multiple);
}

bool makes_table_last(const ModelConfig& config, const RunShape& shape) noexcept {
  return config.tied_head && shape.training && shape.micro_batches > 1;
}

bool is_adapter(const Parameter& parameter) noexcept {
  return parameter.name.ends_with(lora_a) || parameter.name.ends_with(lora_b);
}

std::int64_t hf_tensor_count(const Parameter& parameter) noexcept {
  return parameter.shape.rank() == 3 ? parameter.shape[0] : 1;
}

HfTensor hf_tensor_of(const ModelConfig& config, const Parameter& parameter, std::int64_t index) {
  if (parameter.layer < 0 || parameter.layer > config.layers + 1) {
    throw MisuseError("parameter of another model", parameter.full_name);
  }
  if (is_adapter(parameter))
    throw MisuseError("an adapter's parameter, of which PEFT has tensors", parameter.full_name);
  HfTensor tensor =
      config.family == Family::gpt2 ? gpt2_tensor(config, parameter) : llama_tensor(config, parameter, index);
  if (tensor.rows == 0) tensor.rows = parameter.shape[parameter.shape.rank() == 3 ? 1 : 0];
  return tensor;
}

double positions_seen(std::int64_t sequence, std::int64_t window) noexcept {
  const auto length = static_cast<double>(sequence);
  if (window == 0 || window >= sequence) return (length + 1.0) / 2.0;
  const auto w = static_cast<double>(window);
  return (w * (w + 1.0) / 2.0 + (length - w) * w) / length;
}

}  // namespace tandem
