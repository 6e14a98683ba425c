#include "train/setup/fp8_work.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace tandem {
namespace {

bool may_multiply(const LinearLayer& layer) { return layer.experts == 0 && layer.module != "mlp.gate"; }

bool fits(const LinearLayer& layer, const RunShape& shape) {
  return shape.batch * shape.sequence % fp8_multiple == 0 && layer.inputs % fp8_multiple == 0 &&
         layer.outputs % fp8_multiple == 0;
}

/// Whether an earlier layer takes the same input, which is quantized once for all.
bool shares_input(std::string_view module) {
  return module == "self_attn.k_proj" || module == "self_attn.v_proj" || module == "mlp.up_proj";
}

/// Bytes that quantizing moves for each element: it is read for the largest magnitude, and again for its code.
constexpr double quantized_once = 5.0, quantized_twice = 6.0;
constexpr double kernels_each = 2.0;

}  // namespace

void count_fp8(const ModelConfig& config, const RunShape& shape, bool again, LayerModules& modules) {
  if (!shape.fp8) return;
  const auto tokens = static_cast<double>(shape.batch * shape.sequence);
  std::array<double, module_kinds> all{}, with_codes{};
  for (const LinearLayer& layer : linear_layers(config)) {
    if (!may_multiply(layer)) continue;
    const auto kind = static_cast<std::size_t>(kind_of_linear(layer.module));
    const auto inputs = static_cast<double>(layer.inputs), outputs = static_cast<double>(layer.outputs);
    all[kind] += inputs * outputs;
    if (!fits(layer, shape)) continue;
    with_codes[kind] += inputs * outputs;
    const double of_input = shares_input(layer.module) ? 0.0 : 1.0;
    const PassWork factors{.memory_bytes = quantized_once * (of_input * tokens * inputs + inputs * outputs),
                           .kernels = kernels_each * (of_input + 1.0)};
    LayerWork work{.forward = factors, .backward = factors};
    work.backward.memory_bytes += quantized_twice * tokens * outputs;
    work.backward.kernels += kernels_each;
    if (again) work.backward.memory_bytes += factors.memory_bytes, work.backward.kernels += factors.kernels;
    add(modules[kind], work);
  }
  for (std::size_t kind = 0; kind < module_kinds; ++kind) {
    if (with_codes[kind] == 0.0) continue;
    const double share = with_codes[kind] / all[kind];
    for (PassWork* pass : {&modules[kind].forward, &modules[kind].backward}) {
      pass->fp8_flops = share * pass->matmul_flops;
      pass->matmul_flops -= pass->fp8_flops;
    }
  }
}

bool has_fp8_product(const ModelConfig& config, const RunShape& shape, const Parameter& parameter) {
  if (!shape.fp8 || parameter.layer < 1 || parameter.layer > config.layers) return false;
  return std::ranges::any_of(linear_layers(config), [&](const LinearLayer& layer) {
    return may_multiply(layer) && fits(layer, shape) && parameter.name == layer.module + ".weight";
  });
}

std::vector<std::string> fp8_exceptions(const ModelConfig& config, const RunShape& shape) {
  std::vector<std::string> exceptions;
  if (!shape.fp8) return exceptions;
  for (const LinearLayer& layer : linear_layers(config)) {
    if (!may_multiply(layer) || fits(layer, shape)) continue;
    exceptions.push_back(fmt::format("{} ({} x {})", layer.module, layer.outputs, layer.inputs));
  }
  return exceptions;
}

}  // namespace tandem
