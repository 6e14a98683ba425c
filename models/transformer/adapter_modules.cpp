#include "models/transformer/adapter_modules.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>
#include <string_view>

#include "core/base/error.hpp"

namespace tandem {
namespace {

constexpr std::string_view weight_ending = ".weight", in_peft = "base_model.model.";
constexpr const char *gate_up = "mlp.experts.gate_up_proj", *down = "mlp.experts.down_proj";

std::string in_block(const ModelConfig& config, std::int64_t block, std::string_view name) {
  return fmt::format("{}.{}.{}", config.family == Family::gpt2 ? "transformer.h" : "model.layers", block, name);
}

/// A module of the layers that begin with `first`.
AdapterModule module_of(std::string name, const std::vector<LinearLayer>& layers, std::size_t first,
                        std::size_t count = 1) {
  const auto begin = layers.begin() + static_cast<std::ptrdiff_t>(first);
  return {std::move(name), {begin, begin + static_cast<std::ptrdiff_t>(count)}};
}

/// Name of the module that holds the adapter of a parameter of all experts. PEFT wraps the module of experts once for
/// each of its parameters, gate_up_proj first.
std::string wrapper_of(const LoraConfig& lora, std::int64_t block, const AdapterModule& module) {
  const LoraModule* const outer = lora.find(block, down);
  const bool is_inner = module.name == gate_up && outer != nullptr && !outer->each_expert;
  return is_inner ? "mlp.experts.base_layer" : "mlp.experts";
}

std::vector<PeftTensor> tensors_of_a(const ModelConfig& config, std::int64_t block, const AdapterModule& module,
                                     const LoraModule& lora) {
  const std::int64_t experts = module.experts(), each = lora.rank * module.inputs();
  std::vector<PeftTensor> tensors;
  if (experts > 0 && !lora.each_expert) {
    const std::string name = in_block(config, block, wrapper_of(*config.lora, block, module));
    return {{.name = name, .shape = {experts * lora.rank, module.inputs()}, .count = experts * each}};
  }
  if (is_router(module)) {
    return {
        {.name = module_in_transformers(config, block, module), .shape = {lora.rank, module.inputs()}, .count = each}};
  }
  for (std::int64_t e = 0; e < std::max<std::int64_t>(1, experts); ++e) {
    tensors.push_back(
        {.name = module_in_files(config, block, module, e), .shape = {lora.rank, module.inputs()}, .count = each});
  }
  return tensors;
}

/// `first_row`: rows of the layers of the module that come before.
std::vector<PeftTensor> tensors_of_b(const ModelConfig& config, std::int64_t block, const AdapterModule& module,
                                     const LoraModule& lora, const LinearLayer& layer, std::int64_t first_row) {
  std::vector<PeftTensor> tensors = tensors_of_a(config, block, module, lora);
  const std::int64_t in_each = tensors.size() == 1 ? std::max<std::int64_t>(1, module.experts()) : 1;
  for (PeftTensor& tensor : tensors) {
    tensor.shape = {module.outputs(), lora.rank * in_each};
    tensor.transposed = true;
    tensor.first_row = first_row;
    tensor.experts = in_each;
    tensor.count = layer.outputs * lora.rank * in_each;
  }
  return tensors;
}

void name_as_peft(std::vector<PeftTensor>& tensors, std::string_view ending) {
  for (PeftTensor& tensor : tensors) tensor.name = fmt::format("{}{}{}", in_peft, tensor.name, ending);
}

}  // namespace

std::int64_t AdapterModule::outputs() const {
  std::int64_t sum = 0;
  for (const LinearLayer& layer : layers) sum += layer.outputs;
  return sum;
}

std::vector<AdapterModule> adapter_modules(const ModelConfig& c) {
  const std::vector<LinearLayer> layers = linear_layers(c);
  std::vector<AdapterModule> modules;
  if (c.fused_tensors) {  // q, k, v, o, gate, up, down
    return {module_of("self_attn.qkv_proj", layers, 0, 3), module_of(layers[3].module, layers, 3),
            module_of("mlp.gate_up_proj", layers, 4, 2), module_of(layers[6].module, layers, 6)};
  }
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (layers[i].module == "mlp.experts.gate_proj") modules.push_back(module_of(gate_up, layers, i, 2));
    modules.push_back(module_of(layers[i].module, layers, i));
  }
  if (c.experts > 0) modules.push_back({router_module, {{router_module, c.experts, c.width}}});
  return modules;
}

std::string a_of(const AdapterModule& module) { return fmt::format("{}{}", module.name, lora_a); }
std::string b_of(const LinearLayer& layer) { return fmt::format("{}{}", layer.module, lora_b); }

bool is_router(const AdapterModule& module) { return module.name == router_module; }

std::string module_in_files(const ModelConfig& config, std::int64_t block, const AdapterModule& module,
                            std::int64_t expert) {
  if (module.experts() == 0 && !is_router(module)) return in_block(config, block, module.name);
  const LinearLayer& of = module.layers.front();
  const Parameter weight{
      .name = of.module + std::string(weight_ending),
      .full_name = {},
      .layer = static_cast<int>(block) + 1,
      .shape = of.experts > 0 ? Shape{of.experts, of.outputs, of.inputs} : Shape{of.outputs, of.inputs},
      .options = {}};
  const std::string name = hf_tensor_of(config, weight, expert).name;
  return name.substr(0, name.size() - weight_ending.size());
}

std::string module_in_transformers(const ModelConfig& config, std::int64_t block, const AdapterModule& module) {
  return in_block(config, block, module.name);
}

std::vector<PeftTensor> adapter_tensors(const ModelConfig& config, const Parameter& p) {
  const std::int64_t block = p.layer - 1;
  for (const AdapterModule& module : adapter_modules(config)) {
    const LoraModule* const lora = config.lora.value().find(block, module.name);
    if (lora == nullptr) continue;
    std::vector<PeftTensor> tensors;
    if (p.name == a_of(module)) {
      tensors = tensors_of_a(config, block, module, *lora);
      name_as_peft(tensors, lora_a);
      return tensors;
    }
    std::int64_t first_row = 0;
    for (const LinearLayer& layer : module.layers) {
      if (p.name == b_of(layer)) {
        tensors = tensors_of_b(config, block, module, *lora, layer, first_row);
        name_as_peft(tensors, lora_b);
        return tensors;
      }
      first_row += layer.outputs;
    }
  }
  throw MisuseError("no adapter of this model", p.full_name);
}

}  // namespace tandem
