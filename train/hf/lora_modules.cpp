#include "train/hf/lora_modules.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <regex>
#include <set>
#include <utility>

#include "core/base/error.hpp"
#include "models/transformer/adapter_modules.hpp"
#include "models/transformer/transformer.hpp"
#include "train/config/lora_targets.hpp"
#include "train/config/name_pattern.hpp"
#include "train/hf/model_names.hpp"

namespace tandem {
namespace {

/// A module of a block that may have an adapter.
struct Candidate {
  std::size_t block = 0;
  std::string name;                 ///< LoraModule::name
  std::vector<std::string> wholes;  ///< "model.layers.0.self_attn.q_proj"; of experts, the module of each
  std::int64_t least_side = 0;
  bool of_experts = false;
  bool is_parameter = false;  ///< one parameter of all experts; PEFT's target_modules name modules alone
  bool is_router = false;     ///< a linear layer in files and a parameter in transformers, and may be named as either

  /// Name as a parameter of transformers.
  std::string parameter() const { return is_router ? wholes.front() + ".weight" : wholes.front(); }
};

std::string without_last_part(const std::string& name) { return name.substr(0, name.rfind('.')); }

bool is_router(const ModelConfig& config, const Parameter& p) {
  return config.experts > 0 && p.name == std::string(router_module) + ".weight";
}

std::string last_part(const std::string& name) { return name.substr(name.rfind('.') + 1); }

/// The forms that an adapter of a module may have: of experts one of the parameter that transformers has of all, one of
/// the modules that files have, or a choice of both.
void add_candidates(const ModelConfig& config, std::size_t block, const AdapterModule& module,
                    std::vector<Candidate>& to) {
  const auto of_block = static_cast<std::int64_t>(block);
  Candidate candidate{.block = block,
                      .name = module.name,
                      .wholes = {},
                      .least_side = std::min(module.inputs(), module.outputs()),
                      .of_experts = module.experts() > 0};
  const bool is_gate_up = module.layers.size() > 1, is_down = module.name.ends_with(".down_proj");
  if (is_router(module)) {
    candidate.is_router = true;
    candidate.least_side = module.inputs();  // usual ranks are beyond the number of experts
    candidate.wholes = {module_in_transformers(config, of_block, module), module_in_files(config, of_block, module, 0)};
    to.push_back(std::move(candidate));
    return;
  }
  if (candidate.of_experts && (is_gate_up || is_down)) {
    Candidate& parameter = to.emplace_back(candidate);
    parameter.is_parameter = true;
    parameter.wholes = {module_in_transformers(config, of_block, module)};
    if (is_gate_up) return;
  }
  for (std::int64_t e = 0; e < std::max<std::int64_t>(1, module.experts()); ++e) {
    candidate.wholes.push_back(module_in_files(config, of_block, module, e));
  }
  to.push_back(std::move(candidate));
}

std::vector<Candidate> candidates_of(const ModelConfig& config) {
  const ModelConfig plain = without_adapters(config);
  std::vector<Candidate> candidates;
  const std::vector<AdapterModule> modules = adapter_modules(plain);
  for (std::size_t block = 0; block < static_cast<std::size_t>(plain.layers); ++block) {
    for (const AdapterModule& module : modules) add_candidates(plain, block, module, candidates);
  }
  return candidates;
}

/// Names of all modules but the linear layers of blocks.
std::set<std::string> other_modules(const ModelConfig& config, const std::vector<Candidate>& linear) {
  const ModelConfig plain = without_adapters(config);
  const ParameterLayout layout = layout_of(plain);
  std::set<std::string> names{"lm_head"};
  for (const Parameter* p : layout.owned_parameters()) names.insert(module_of(plain, *p));
  for (const Candidate& c : linear) {
    if (c.is_router) continue;  // it may be saved whole
    for (const std::string& whole : c.wholes) names.erase(whole);
  }
  return names;
}

bool is_flag(std::string_view typed) { return typed.starts_with("--"); }

/// Words before `value` and it, for errors: the flag, or in the file that the targets stand in the field `key`.
std::string said(std::string_view typed, std::string_view flag, std::string_view key, std::string_view value) {
  constexpr std::string_view of_targets = "target_modules";
  if (!typed.ends_with(of_targets)) return fmt::format("{} {}", flag, value);
  return fmt::format("{}{} {}", typed.substr(0, typed.size() - of_targets.size()), key, value);
}
std::string typed_experts(std::string_view typed, const LoraOptions& options) {
  return said(typed, "--lora-experts", "target_parameters", options.experts);
}

[[noreturn]] void refuse_target(const ModelConfig& config, const std::string& name,
                                const std::vector<Candidate>& linear, std::string_view typed) {
  const std::string what = fmt::format("{} {}", typed, name);
  const auto is_it = [&](const std::string& module) { return names_module(module, name); };
  if (std::ranges::any_of(other_modules(config, linear), is_it)) {
    throw UsageError(what, "it is no linear layer of a block, which alone have adapters",
                     is_flag(typed) ? fmt::format("leave it out; --lora-modules-to-save {} trains it whole", name)
                                    : "merge it into its base with PEFT (merge_and_unload, then save_pretrained)");
  }
  for (const AdapterModule& module : adapter_modules(without_adapters(config))) {
    const auto is_part = [&](const LinearLayer& layer) { return names_module(layer.module, last_part(name)); };
    if (std::ranges::none_of(module.layers, is_part)) continue;
    throw UsageError(what, fmt::format("files of {} hold it in one tensor with others", config.architecture),
                     fmt::format("name {}, which has one adapter", last_part(module.name)));
  }
  std::set<std::string> names;
  for (const Candidate& c : linear) {
    if (!c.is_parameter && !c.is_router) names.insert(last_part(c.wholes.front()));
  }
  const std::vector<std::string> all(names.begin(), names.end());
  const std::vector<std::string> near = nearest_names(name, all);
  throw UsageError(what, fmt::format("{} has no such linear layer", config.name),
                   near.empty() ? fmt::format("its linear layers are {}", fmt::join(all, ", "))
                                : fmt::format("perhaps {}", fmt::join(near, ", ")));
}

/// Number of the candidate's modules that are targeted.
std::size_t count_targeted(const Candidate& c, const LoraTargets& targets) {
  if (targets.all) return c.is_router || (c.of_experts && !c.is_parameter) ? 0 : c.wholes.size();
  const auto matches = [&](const std::string& whole) { return targets.matches(whole); };
  return static_cast<std::size_t>(std::ranges::count_if(c.wholes, matches));
}

bool names_one(const Candidate& c, const std::string& name) {
  return std::ranges::any_of(c.wholes, [&](const std::string& whole) { return names_module(whole, name); });
}

void require_found(const ModelConfig& config, const LoraTargets& targets, const LoraOptions& options,
                   const std::vector<Candidate>& linear, std::string_view typed) {
  for (const std::string& name : targets.names) {
    const auto is_it = [&](const Candidate& c) { return !c.is_parameter && names_one(c, name); };
    if (std::ranges::none_of(linear, is_it)) refuse_target(config, name, linear, typed);
  }
  const auto is_found = [&](const Candidate& c) { return !c.is_parameter && count_targeted(c, targets) > 0; };
  if (targets.none || std::ranges::any_of(linear, is_found)) return;
  throw UsageError(fmt::format("{} {}", typed, options.targets), "it matches the whole name of no linear layer",
                   fmt::format("they are named like {}", linear.back().wholes.front()));
}

void require_experts(const ModelConfig& config, const LoraTargets& experts, const LoraOptions& options,
                     const std::vector<Candidate>& candidates, std::string_view typed) {
  if (experts.none) return;
  const std::string what = typed_experts(typed, options);
  if (config.experts == 0) throw UsageError(what, fmt::format("{} has no experts", config.name), "leave it out");
  for (const std::string& name : experts.names) {
    const auto is_it = [&](const Candidate& c) {
      return (c.is_parameter || c.is_router) && names_module(c.parameter(), name);
    };
    if (std::ranges::any_of(candidates, is_it)) continue;
    throw UsageError(
        what, fmt::format("{} is no matrix of experts", name),
        "they are mlp.experts.gate_up_proj and mlp.experts.down_proj, and the router's is mlp.gate.weight; "
        "linear layers are named by --lora-targets");
  }
}

bool ends_as_one_of(std::string_view module, const std::vector<std::string>& endings) {
  return std::ranges::any_of(endings, [&](const std::string& ending) { return module.ends_with(ending); });
}

void require_saved_modules(const ModelConfig& config, const std::vector<Candidate>& linear,
                           const std::vector<std::string>& names, std::string_view typed) {
  std::set<std::string> known = other_modules(config, linear);
  for (const Candidate& c : linear) {
    if (!c.is_router) known.insert(c.wholes.begin(), c.wholes.end());
  }
  // Routers of Mixtral have another name in transformers than in files, by which PEFT would look for them.
  std::erase_if(known, [](const std::string& module) {
    return module.find(".experts.") != std::string::npos || module.ends_with("block_sparse_moe.gate");
  });
  for (const std::string& name : names) {
    if (std::ranges::any_of(known, [&](const std::string& module) { return module.ends_with(name); })) continue;
    std::set<std::string> last;
    for (const std::string& module : known) last.insert(last_part(module));
    const std::vector<std::string> all(last.begin(), last.end());
    const std::vector<std::string> near = nearest_names(name, all);
    throw UsageError(
        said(typed, "--lora-modules-to-save", "modules_to_save", name),
        fmt::format("{} has no such module", config.name),
        fmt::format("{}{} {}", is_flag(typed) ? "" : "name the base that the adapter was made of; ",
                    near.empty() ? "its modules are" : "perhaps", fmt::join(near.empty() ? all : near, ", ")));
  }
}

/// Values of modules by regular expressions that their names are matched with as PEFT does.
template <class T>
class ByPattern {
 public:
  explicit ByPattern(const std::vector<std::pair<std::string, T>>& patterns) {
    for (const auto& [text, value] : patterns) patterns_.emplace_back(name_pattern("(.*\\.)?(" + text + ")"), value);
  }
  T of(const std::string& whole, T otherwise) const {
    const auto found =
        std::ranges::find_if(patterns_, [&](const auto& entry) { return std::regex_match(whole, entry.first); });
    return found == patterns_.end() ? otherwise : found->second;
  }
  /// Throws UsageError where modules of experts, which are one parameter here, have different ones.
  T of(const Candidate& candidate, T otherwise) const {
    const T value = of(candidate.wholes.front(), otherwise);
    for (const std::string& whole : candidate.wholes) {
      if (patterns_.empty() || of(whole, otherwise) == value) continue;
      throw UsageError(fmt::format("adapter of {}", whole),
                       "its rank or alpha is another than that of the layer's other experts",
                       "give all experts of a layer one");
    }
    return value;
  }

 private:
  std::vector<std::pair<std::regex, T>> patterns_;
};

/// Chooses adapters among the candidates.
class Choice {
 public:
  Choice(const LoraOptions& options, std::string_view typed)
      : options_(options),
        typed_(typed),
        targets_(parse_lora_targets(options.targets)),
        experts_(parse_lora_experts(options.experts)),
        ranks_(options.rank_pattern),
        alphas_(options.alpha_pattern) {}

  const LoraTargets& targets() const { return targets_; }
  const LoraTargets& experts() const { return experts_; }
  bool chooses(const Candidate& c) const;
  bool chooses_router(const Candidate& c) const;
  LoraModule module_of(const Candidate& c) const;

 private:
  /// A value by patterns, which may name a router in either way.
  template <class T>
  static T of(const ByPattern<T>& patterns, const Candidate& c, T otherwise) {
    if (!c.is_router) return patterns.of(c, otherwise);
    for (const std::string& whole : c.wholes) otherwise = patterns.of(whole, otherwise);
    return patterns.of(c.parameter(), otherwise);
  }

  const LoraOptions& options_;
  std::string_view typed_;
  LoraTargets targets_, experts_;
  ByPattern<std::int64_t> ranks_;
  ByPattern<double> alphas_;
};

bool Choice::chooses_router(const Candidate& c) const {
  if (ends_as_one_of(c.wholes.back(), options_.modules_to_save)) return false;
  return count_targeted(c, targets_) > 0 || (!experts_.all && experts_.matches(c.parameter()));
}

bool Choice::chooses(const Candidate& c) const {
  if (c.is_router) return chooses_router(c);
  if (c.is_parameter) return experts_.all || experts_.matches(c.wholes.front());
  const std::size_t targeted = count_targeted(c, targets_);
  if (targeted == 0 || (!c.of_experts && ends_as_one_of(c.wholes.front(), options_.modules_to_save))) return false;
  if (targeted == c.wholes.size()) return true;
  throw UsageError(fmt::format("{} {}", typed_, options_.targets),
                   fmt::format("it matches {} of {} experts of block {}", targeted, c.wholes.size(), c.block),
                   "name all experts of a layer, or none");
}

LoraModule Choice::module_of(const Candidate& c) const {
  const std::int64_t rank = of(ranks_, c, options_.rank);
  if (rank > c.least_side) {
    const bool by_flag = is_flag(typed_);
    throw UsageError(by_flag ? fmt::format("--lora-rank {}", rank) : fmt::format("{}, rank {}", typed_, rank),
                     fmt::format("the smaller side of {} is {}", c.wholes.front(), c.least_side),
                     by_flag ? fmt::format("use at most --lora-rank {}, or leave it out of {}", c.least_side,
                                           c.is_parameter ? "--lora-experts" : "--lora-targets")
                             : "name the base that the adapter was made of");
  }
  if ((c.of_experts || c.is_router) && options_.dropout.value_or(0.0) > 0.0) {
    throw UsageError(said(typed_, "--lora-dropout", "lora_dropout", fmt::format("{}", *options_.dropout)),
                     "adapters of experts and routers have none, as in PEFT",
                     is_flag(typed_) ? "leave it out, or them" : "--lora-dropout 0 trains on without it");
  }
  return {.name = c.name,
          .rank = rank,
          .alpha = of(alphas_, c, options_.alpha_or_default()),
          .each_expert = c.of_experts && !c.is_parameter};
}

/// Throws UsageError where experts have adapters of both forms, which add up in no one's arithmetic.
void refuse_both_forms(const std::vector<Candidate>& chosen, std::string_view typed, const LoraOptions& options) {
  const auto is_parameter = [](const Candidate& c) { return c.is_parameter; };
  const auto is_module = [](const Candidate& c) { return c.of_experts && !c.is_parameter; };
  if (std::ranges::none_of(chosen, is_parameter) || std::ranges::none_of(chosen, is_module)) return;
  throw UsageError(typed_experts(typed, options), fmt::format("{} names experts too", typed), "name them once");
}

/// Throws UsageError where some layers of experts that are named have an adapter and some have not: PEFT, which has
/// their three matrices in two parameters, loads all or none of them.
void refuse_parts_of_experts(const std::vector<Candidate>& chosen, const LoraOptions& options) {
  constexpr std::size_t matrices = 3;
  std::map<std::size_t, std::vector<std::string>> by_block;
  for (const Candidate& c : chosen) {
    if (c.of_experts && !c.is_parameter) by_block[c.block].push_back(last_part(c.wholes.front()));
  }
  for (const auto& [block, names] : by_block) {
    if (names.size() == matrices) continue;
    throw UsageError(fmt::format("--lora-targets {}", options.targets),
                     fmt::format("of the experts of block {} it names {} alone, which PEFT does not load", block,
                                 fmt::join(names, ", ")),
                     "name all three of their layers, or use --lora-experts");
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
  const std::vector<Candidate> candidates = candidates_of(config);
  const Choice choice(options, typed);
  require_found(config, choice.targets(), options, candidates, typed);
  require_experts(config, choice.experts(), options, candidates, typed);
  require_saved_modules(config, candidates, options.modules_to_save, typed);
  LoraConfig lora{.rank = options.rank,
                  .alpha = options.alpha_or_default(),
                  .rank_stabilized = options.rank_stabilized.value_or(false),
                  .dropout = options.dropout.value_or(0.0),
                  .modules = {}};
  lora.modules.resize(static_cast<std::size_t>(config.layers));
  std::vector<Candidate> chosen;
  for (const Candidate& c : candidates) {
    if (!choice.chooses(c)) continue;
    lora.modules[c.block].push_back(choice.module_of(c));
    chosen.push_back(c);
  }
  refuse_both_forms(chosen, typed, options);
  if (is_flag(typed)) refuse_parts_of_experts(chosen, options);
  if (chosen.empty()) {
    throw UsageError(fmt::format("{} {}", typed, options.targets),
                     choice.targets().none ? "and no --lora-experts: nothing has an adapter"
                                           : "--lora-modules-to-save trains all of it whole");
  }
  return lora;
}

namespace {

/// Whether that form of a module is the one that has an adapter.
bool is_adapted(const LoraConfig& lora, const Candidate& c) {
  const LoraModule* const module = lora.find(static_cast<std::int64_t>(c.block), c.name);
  return module != nullptr && module->each_expert == (c.of_experts && !c.is_parameter);
}

}  // namespace

std::vector<std::string> target_names(const ModelConfig& config, const LoraConfig& lora) {
  std::vector<Candidate> linear = candidates_of(config);
  std::erase_if(linear, [](const Candidate& c) { return c.is_parameter || c.is_router; });
  const auto names_these_alone = [&](const std::string& name) {
    return std::ranges::all_of(linear, [&](const Candidate& c) { return is_adapted(lora, c) || !names_one(c, name); });
  };
  std::set<std::string> names;
  for (const Candidate& c : linear) {
    if (!is_adapted(lora, c)) continue;
    const std::string last = last_part(c.wholes.front());
    if (names_these_alone(last)) {
      names.insert(last);
    } else if (!c.of_experts && names_these_alone(c.name)) {
      names.insert(c.name);
    } else {
      names.insert(c.wholes.begin(), c.wholes.end());
    }
  }
  return {names.begin(), names.end()};
}

std::vector<std::string> target_parameters(const ModelConfig& config, const LoraConfig& lora) {
  const std::vector<Candidate> candidates = candidates_of(config);
  const auto all_have = [&](const std::string& name) {
    return std::ranges::all_of(candidates, [&](const Candidate& c) {
      return !(c.is_parameter || c.is_router) || c.name != name || is_adapted(lora, c);
    });
  };
  std::set<std::string> names;
  for (const Candidate& c : candidates) {
    if (!(c.is_parameter || c.is_router) || !is_adapted(lora, c)) continue;
    const std::string in_block = c.is_router ? c.name + ".weight" : c.name;
    names.insert(all_have(c.name) ? in_block : c.parameter());
  }
  return {names.begin(), names.end()};
}

}  // namespace tandem
