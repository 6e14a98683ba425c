#include "train/hf/trained_layout.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "core/base/error.hpp"
#include "models/transformer/transformer.hpp"
#include "train/config/name_pattern.hpp"
#include "train/hf/lora_modules.hpp"

namespace tandem {
namespace {

/// Whether a parameter's names all match, or none does. Throws UsageError where only some do: experts are one
/// parameter.
template <class Frozen>
bool all_frozen(const ModelConfig& config, const Parameter& p, const Frozen& frozen) {
  const std::int64_t count = hf_tensor_count(p);
  std::int64_t matching = 0;
  for (std::int64_t i = 0; i < count; ++i) matching += frozen(hf_tensor_of(config, p, i).name) ? 1 : 0;
  if (matching == 0 || matching == count) return matching > 0;
  throw UsageError(fmt::format("--freeze matches {} of {} experts' {}", matching, count, p.full_name),
                   "the experts of a layer are trained together", "a pattern that matches all of them, or none");
}

/// `plain`, the model's layout, with `choose(parameter, options)` changing the options of those that own storage.
template <class Choose>
ParameterLayout layout_with(const ParameterLayout& plain, const Choose& choose) {
  ParameterLayout layout;
  for (const Layer& layer : plain.layers()) {
    auto builder = layout.add_layer(layer.name);
    for (const Parameter& p : layer.parameters) {
      ParameterOptions options = p.options;
      if (!p.tied()) choose(p, options);
      builder.add(p.name, p.shape, options);
    }
  }
  for (const Layer& layer : plain.layers()) {
    for (const Parameter& p : layer.parameters) {
      if (!p.tied()) continue;
      const Layer& owner = plain.layer(p.tied_layer);
      layout.tie(owner.parameters.at(static_cast<std::size_t>(p.tied_index)).full_name, p.full_name);
    }
  }
  return layout;
}

}  // namespace

ParameterLayout frozen_layout(const ModelConfig& config, const std::string& pattern, DType ends) {
  ParameterLayout plain = layout_of(config, DType::bf16, ends);
  if (pattern.empty()) return plain;
  const std::regex expression = name_pattern(pattern);
  std::size_t trained = 0;
  const auto frozen = [&](const std::string& name) { return std::regex_search(name, expression); };
  ParameterLayout layout = layout_with(plain, [&](const Parameter& p, ParameterOptions& options) {
    options.trainable = !all_frozen(config, p, frozen);
    trained += options.trainable ? 1 : 0;
  });
  if (trained == 0) {
    throw UsageError(fmt::format("--freeze {}", pattern), "it freezes every parameter", "leave something to train");
  }
  const auto owned = layout.owned_parameters();
  if (trained == owned.size()) {
    throw UsageError(fmt::format("--freeze {}", pattern), "it matches no parameter that is not tied to another",
                     fmt::format("they are named like {}", hf_tensor_of(config, *owned.back()).name));
  }
  return layout;
}

ParameterLayout trained_layout(const TrainConfig& config, const ModelConfig& model, DType ends) {
  ParameterLayout layout = frozen_layout(model, config.freeze, ends);
  if (model.lora) {
    layout = layout_with(layout, [&](const Parameter& p, ParameterOptions& options) {
      options.trainable = is_adapter(p) || is_saved_module(model, p, config.lora.modules_to_save);
    });
  }
  const bool freezes = model.lora || !config.freeze.empty();
  const WeightCode base = config.base.value_or(freezes ? model.stored_code : WeightCode::none);
  if (base == WeightCode::none) return layout;
  bool any = false;
  layout = layout_with(layout, [&](const Parameter& p, ParameterOptions& options) {
    if (options.trainable || !is_codable(model, p)) return;
    options.code = base;
    any = true;
  });
  if (any || !config.base) return layout;
  throw UsageError(fmt::format("--base {}", base_name(base)), "it is for frozen matrices of blocks, and none is frozen",
                   "give --lora-rank, or --freeze for some of them, or leave it out");
}

ParameterLayout forward_layout(const ModelConfig& config) {
  return layout_with(layout_of(config), [](const Parameter&, ParameterOptions& options) { options.trainable = false; });
}

ParameterLayout with_fp8_factors(const ParameterLayout& layout,
                                 const std::function<bool(const Parameter&)>& is_factor) {
  return layout_with(layout, [&](const Parameter& p, ParameterOptions& options) {
    options.fp8_factor = options.trainable && is_factor(p);
  });
}

ParameterLayout base_layout(const ModelConfig& plain, const ParameterLayout& layout) {
  return layout_with(layout_of(plain), [&](const Parameter& p, ParameterOptions& options) {
    const ParameterOptions& present = layout.parameter(p.full_name).options;
    options.trainable = present.trainable;
    options.code = present.code;
  });
}

WeightCode base_format(const ParameterLayout& layout) noexcept {
  for (const Layer& layer : layout.layers()) {
    const auto coded = std::ranges::find_if(layer.parameters, &Parameter::coded);
    if (coded != layer.parameters.end()) return coded->options.code;
  }
  return WeightCode::none;
}

}  // namespace tandem
