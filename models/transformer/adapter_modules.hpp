#pragma once
// Modules of a block that can have adapters, the parameters of these, and the tensors that PEFT has of them.
#include <cstdint>
#include <string>
#include <vector>

#include "models/transformer/transformer.hpp"

namespace tandem {

/// A linear layer, or several whose matrices lie above one another in one of transformers' modules: they share A, and
/// each has its rows of B.
struct AdapterModule {
  std::string name;  ///< within its block, as transformers has it: "self_attn.q_proj", "self_attn.qkv_proj"
  std::vector<LinearLayer> layers;  ///< in the order of their rows

  std::int64_t inputs() const { return layers.front().inputs; }
  std::int64_t outputs() const;  ///< rows of all its layers
  std::int64_t experts() const { return layers.front().experts; }
};

/// Modules that every block has, in the order in which forward uses them, a router behind them. Of experts there are
/// two choices for gate and up: "mlp.experts.gate_up_proj", or one module for each, of which a block has one or the
/// other.
std::vector<AdapterModule> adapter_modules(const ModelConfig& config);

/// Names of the parameters A of a module, and B of one of its layers.
std::string a_of(const AdapterModule& module);
std::string b_of(const LinearLayer& layer);

/// Whether a module is a mixture's router, which in transformers is a parameter and in files a linear layer.
bool is_router(const AdapterModule& module);

/// Name of a module of a block as the model's files have it; of experts that of number `expert`:
/// "model.layers.0.mlp.experts.7.up_proj".
std::string module_in_files(const ModelConfig& config, std::int64_t block, const AdapterModule& module,
                            std::int64_t expert);
/// Name of the module in transformers, in which all experts are one: "model.layers.0.mlp.experts.gate_up_proj".
std::string module_in_transformers(const ModelConfig& config, std::int64_t block, const AdapterModule& module);

/// A tensor of PEFT's file that a parameter is, or is part of, or that is part of it.
struct PeftTensor {
  std::string name;
  std::vector<std::int64_t> shape;
  /// Lies the other way round: (O, r), of B that is (r, O) here.
  bool transposed = false;
  std::int64_t first_row = 0;  ///< tensor's row that is the first of the parameter
  /// Experts in a transposed tensor, (O, r E): the first column of each, then the second of each, and so on.
  std::int64_t experts = 1;
  std::int64_t count = 0;  ///< elements of the parameter that it holds

  /// Index in the tensor of element `i` of those.
  std::int64_t place(std::int64_t i) const noexcept {
    if (!transposed) return first_row * (shape.size() > 1 ? shape[1] : 1) + i;
    const std::int64_t columns = shape[1], rank = columns / experts, rows = count / columns;
    return (first_row + i % rows) * columns + i / rows % rank * experts + i / (rows * rank);
  }
};

/// Tensors of a matrix of an adapter, each of an equal part of it, in their order.
std::vector<PeftTensor> adapter_tensors(const ModelConfig& config, const Parameter& parameter);

}  // namespace tandem
