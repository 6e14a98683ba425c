#include "train/hf/lora_modules.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>
#include <utility>

#include "core/base/error.hpp"
#include "models/transformer/transformer.hpp"
#include "train/config/lora_targets.hpp"
#include "train/hf/model_names.hpp"

namespace tandem {
namespace {

/// A linear layer of a block that may have an adapter.
struct LinearModule {
  std::size_t block = 0;
  std::string name;   ///< within its block: "self_attn.q_proj"
  std::string whole;  ///< "model.layers.0.self_attn.q_proj"
  std::int64_t least_side = 0;
  bool fused = false;  ///< files hold it in one tensor with others
};

constexpr std::string_view weight_ending = ".weight";

std::string without_last_part(const std::string& name) { return name.substr(0, name.rfind('.')); }

bool is_router(const ModelConfig& config, const Parameter& p) {
  return config.experts > 0 && p.name == "mlp.gate.weight";
}

std::vector<LinearModule> linear_modules(const ModelConfig& config) {
  const ModelConfig plain = without_adapters(config);
  std::vector<LinearModule> modules;
  const ParameterLayout layout = layout_of(plain);
  for (const Parameter* p : layout.owned_parameters()) {
    const bool in_block = p->layer > 0 && p->layer <= plain.layers;
    if (!in_block || p->shape.rank() != 2 || !p->name.ends_with(weight_ending) || is_router(plain, *p)) continue;
    const HfTensor tensor = hf_tensor_of(plain, *p);
    modules.push_back({.block = static_cast<std::size_t>(p->layer - 1),
                       .name = without_last_part(p->name),
                       .whole = without_last_part(tensor.name),
                       .least_side = std::min(p->shape[0], p->shape[1]),
                       .fused = tensor.rows != p->shape[0]});
  }
  return modules;
}

/// Names of all modules but the linear layers of blocks.
std::set<std::string> other_modules(const ModelConfig& config, const std::vector<LinearModule>& linear) {
  const ModelConfig plain = without_adapters(config);
  const ParameterLayout layout = layout_of(plain);
  std::set<std::string> names{"lm_head"};
  for (const Parameter* p : layout.owned_parameters()) names.insert(module_of(plain, *p));
  for (const LinearModule& m : linear) names.erase(m.whole);
  return names;
}

[[noreturn]] void refuse_target(const ModelConfig& config, const std::string& name,
                                const std::vector<LinearModule>& linear, std::string_view typed) {
  const std::string what = fmt::format("{} {}", typed, name);
  const auto is_it = [&](const std::string& module) { return names_module(module, name); };
  if (std::ranges::any_of(other_modules(config, linear), is_it)) {
    throw UsageError(what, "it is no linear layer of a block, which alone have adapters",
                     fmt::format("leave it out; --lora-modules-to-save {} trains it whole", name));
  }
  std::set<std::string> names;
  for (const LinearModule& m : linear) {
    if (!m.fused) names.insert(m.whole.substr(m.whole.rfind('.') + 1));
  }
  const std::vector<std::string> all(names.begin(), names.end());
  const std::vector<std::string> near = nearest_names(name, all);
  throw UsageError(what, fmt::format("{} has no such linear layer", config.name),
                   near.empty() ? fmt::format("its linear layers are {}", fmt::join(all, ", "))
                                : fmt::format("perhaps {}", fmt::join(near, ", ")));
}

[[noreturn]] void refuse_fused(const ModelConfig& config, const LinearModule& module, std::string_view typed) {
  throw UsageError(fmt::format("{} {}", typed, module.whole),
                   fmt::format("files of {} hold it in one tensor with other layers, and such have no adapters",
                               config.architecture),
                   "name others, such as o_proj,down_proj");
}

void require_found(const ModelConfig& config, const LoraTargets& targets, const LoraOptions& options,
                   const std::vector<LinearModule>& linear, std::string_view typed) {
  for (const std::string& name : targets.names) {
    const auto is_it = [&](const LinearModule& m) { return names_module(m.whole, name); };
    if (std::ranges::none_of(linear, is_it)) refuse_target(config, name, linear, typed);
  }
  if (std::ranges::any_of(linear, [&](const LinearModule& m) { return targets.matches(m.whole); })) return;
  throw UsageError(fmt::format("{} {}", typed, options.targets), "it matches the whole name of no linear layer",
                   fmt::format("they are named like {}", linear.back().whole));
}

bool ends_as_one_of(std::string_view module, const std::vector<std::string>& endings) {
  return std::ranges::any_of(endings, [&](const std::string& ending) { return module.ends_with(ending); });
}

void require_saved_modules(const ModelConfig& config, const std::vector<LinearModule>& linear,
                           const std::vector<std::string>& names) {
  std::set<std::string> known = other_modules(config, linear);
  for (const LinearModule& m : linear) known.insert(m.whole);
  std::erase_if(known, [](const std::string& module) { return module.find(".experts.") != std::string::npos; });
  for (const std::string& name : names) {
    if (std::ranges::any_of(known, [&](const std::string& module) { return module.ends_with(name); })) continue;
    std::set<std::string> last;
    for (const std::string& module : known) last.insert(module.substr(module.rfind('.') + 1));
    const std::vector<std::string> all(last.begin(), last.end());
    const std::vector<std::string> near = nearest_names(name, all);
    throw UsageError(
        fmt::format("--lora-modules-to-save {}", name), fmt::format("{} has no such module", config.name),
        fmt::format("{} {}", near.empty() ? "its modules are" : "perhaps", fmt::join(near.empty() ? all : near, ", ")));
  }
}

}  // namespace

ModelConfig without_adapters(ModelConfig config) {
  config.lora.reset();
  return config;
}

std::string module_of(const ModelConfig& config, const Parameter& p) {
  return without_last_part(hf_tensor_of(config, p).name);
}

bool is_saved_module(const ModelConfig& config, const Parameter& p, const std::vector<std::string>& modules) {
  if (is_adapter(p) || p.shape.rank() == 3) return false;
  const bool shared = config.tied_head && p.layer == 0 && p.name == "tokens";
  return ends_as_one_of(module_of(config, p), modules) || (shared && ends_as_one_of("lm_head", modules));
}

bool is_codable(const ModelConfig& config, const Parameter& p) {
  const bool in_block = p.layer > 0 && p.layer <= config.layers;
  return in_block && p.shape.rank() > 1 && p.options.weight == DType::bf16 && !is_adapter(p) && !is_router(config, p);
}

LoraConfig lora_config(const ModelConfig& config, const LoraOptions& options, std::string_view typed) {
  const std::vector<LinearModule> linear = linear_modules(config);
  const LoraTargets targets = parse_lora_targets(options.targets);
  require_found(config, targets, options, linear, typed);
  require_saved_modules(config, linear, options.modules_to_save);
  LoraConfig lora{.rank = options.rank,
                  .alpha = options.alpha_or_default(),
                  .rank_stabilized = options.rank_stabilized.value_or(false),
                  .dropout = options.dropout.value_or(0.0),
                  .modules = {}};
  lora.modules.resize(static_cast<std::size_t>(config.layers));
  bool any = false;
  for (const LinearModule& m : linear) {
    if (!targets.matches(m.whole) || ends_as_one_of(m.whole, options.modules_to_save)) continue;
    if (m.fused) refuse_fused(config, m, typed);
    if (options.rank > m.least_side) {
      const bool by_flag = typed.starts_with("--");
      throw UsageError(
          by_flag ? fmt::format("--lora-rank {}", options.rank) : fmt::format("{}, rank {}", typed, options.rank),
          fmt::format("the smaller side of {} is {}", m.whole, m.least_side),
          by_flag ? fmt::format("use at most --lora-rank {}, or leave it out of --lora-targets", m.least_side)
                  : "name the base that the adapter was made of");
    }
    lora.modules[m.block].push_back(m.name);
    any = true;
  }
  if (!any)
    throw UsageError(fmt::format("{} {}", typed, options.targets), "--lora-modules-to-save trains all of it whole");
  return lora;
}

std::vector<std::string> target_names(const ModelConfig& config, const LoraConfig& lora) {
  const std::vector<LinearModule> linear = linear_modules(config);
  const auto adapted = [&](const LinearModule& m) { return lora.adapts(static_cast<std::int64_t>(m.block), m.name); };
  const auto names_these_alone = [&](const std::string& name) {
    return std::ranges::all_of(linear,
                               [&](const LinearModule& m) { return adapted(m) || !names_module(m.whole, name); });
  };
  std::set<std::string> names;
  for (const LinearModule& m : linear) {
    if (!adapted(m)) continue;
    const std::string last = m.name.substr(m.name.rfind('.') + 1);
    names.insert(names_these_alone(last) ? last : names_these_alone(m.name) ? m.name : m.whole);
  }
  return {names.begin(), names.end()};
}

}  // namespace tandem
