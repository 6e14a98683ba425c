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

/// Whether a norm or an activation writes the input, with its magnitude.
bool has_measured_input(const ModelConfig& config, std::string_view module) {
  if (module == "mlp.down_proj" || module == "mlp.c_proj") return true;
  if (module == "self_attn.o_proj" || module == "attn.c_proj") return false;
  return config.family == Family::gpt2 || config.norm_before;
}

/// Whether the backward of an activation writes the gradient of the output, with its magnitude.
bool has_measured_gradient(std::string_view module) {
  return module == "mlp.gate_proj" || module == "mlp.up_proj" || module == "mlp.c_fc";
}

/// Work of quantizing so many elements: each is read, and written once, or twice for sums over rows and columns. What
/// comes without its largest magnitude is read once more before, by a kernel of its own.
PassWork quantizing(double elements, double times, bool measured) {
  const double bytes = 2.0 + times;
  return {.memory_bytes = elements * (measured ? bytes : bytes + 2.0), .kernels = measured ? 1.0 : 2.0};
}

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
    const PassWork weight = quantizing(inputs * outputs, 1.0, false);
    LayerWork work{.forward = weight, .backward = weight};
    if (!shares_input(layer.module)) {
      // For backward its magnitude is kept from forward.
      add(work, {.forward = quantizing(tokens * inputs, 1.0, has_measured_input(config, layer.module)),
                 .backward = quantizing(tokens * inputs, 1.0, true)});
    }
    if (again) add(work, {.forward = {}, .backward = work.forward});
    add(work, {.forward = {}, .backward = quantizing(tokens * outputs, 2.0, has_measured_gradient(layer.module))});
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
