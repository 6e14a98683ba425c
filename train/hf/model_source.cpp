#include "train/hf/model_source.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cmath>
#include <system_error>
#include <utility>

#include "core/base/error.hpp"
#include "models/transformer/transformer.hpp"
#include "offload/engine/state_io.hpp"
#include "train/config/config.hpp"
#include "train/hf/adapter_source.hpp"
#include "train/hf/base_hashes.hpp"
#include "train/hf/checkpoint_match.hpp"
#include "train/hf/hf_weights.hpp"
#include "train/hf/lora_modules.hpp"
#include "train/hf/model_folder.hpp"
#include "train/hf/model_names.hpp"
#include "train/hf/quantized_config.hpp"
#include "train/hf/tokenizer_files.hpp"
#include "train/hf/trained_layout.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;

/// The word before the targets of an adapter, for errors.
std::string targets_of(const AdapterSource& adapter) {
  return fmt::format("adapter {}: target_modules", adapter.folder().string());
}

/// Puts an adapter on top of its base. What it drops in training is for take_adapters() to say.
void put_on_top(ModelSource& source, std::shared_ptr<const AdapterSource> adapter) {
  LoraOptions options = adapter->description().options;
  options.dropout.reset();
  source.config.lora = lora_config(source.config, options, targets_of(*adapter));
  source.adapter = std::move(adapter);
}

/// A built-in shape, which has no weights.
ModelSource shape_of(const std::string& name) {
  ModelSource source;
  source.config = builtin_model(name);
  source.base = name;
  return source;
}

/// Words that were typed for a source, for errors.
std::string typed_name(const fs::path& folder, const ModelLookup& lookup) {
  return fmt::format("{} {}", lookup.typed, lookup.folder.empty() ? folder.string() : lookup.folder);
}

/// How the base of a source is looked for. `adapter`: the source where it is one. Throws UsageError where bases name
/// one another.
ModelLookup beneath(const ModelLookup& lookup, const std::string& what, std::string adapter = {}) {
  constexpr int most = 16;
  if (lookup.above < most) {
    return {.typed = lookup.base_at.empty() ? "base" : "--model",
            .trains = false,
            .command = lookup.command,
            .above = lookup.above + 1,
            .adapter_above = std::move(adapter)};
  }
  throw UsageError(what, fmt::format("more than {} checkpoints name each the next one as their base", most),
                   "name a model, and train over that anew");
}

/// Throws UsageError where an adapter is to be the base of another: one of both would be left out.
void refuse_adapter_of_adapter(const fs::path& folder, const ModelLookup& lookup) {
  if (lookup.adapter_above.empty()) return;
  const std::string base = lookup.folder.empty() ? folder.string() : lookup.folder;
  throw UsageError(lookup.adapter_above, fmt::format("its base {} holds an adapter itself", base),
                   fmt::format("tandem export {} --merged --to DIR makes a model of that: name DIR as the base", base));
}

/// Throws UsageError, as the base that an adapter or a checkpoint names is not there.
[[noreturn]] void refuse_missing_base(const fs::path& of, const std::string& base, bool is_adapter,
                                      const ModelLookup& lookup) {
  const std::string folder = lookup.folder.empty() ? of.string() : lookup.folder;
  const std::string advice =
      lookup.above == 0 && !lookup.command.empty()
          ? fmt::format("tandem {} {} --model DIR says where it is now", lookup.command, folder)
      : lookup.above == 0 && is_adapter
          ? fmt::format("give --model DIR, where it is now, and --adapter {}", folder)
          : fmt::format(
                "tandem export {} --model DIR --to NEW, with DIR where it is now, makes a model of both: name "
                "NEW by --model",
                folder);
  throw UsageError(typed_name(of, lookup),
                   fmt::format("{} {}, which is neither here nor in the hub's cache",
                               is_adapter ? "it holds an adapter of" : "its frozen parameters are those of", base),
                   advice);
}

bool is_missing(const std::string& base) {
  std::error_code ignored;
  return !fs::exists(base, ignored) && !cached_snapshot(base);
}

/// The base of an adapter or checkpoint. Random weights are those of the run's seed, where a run had them.
ModelSource find_base(const std::string& base, const Checkpoint* run, const ModelLookup& lookup) {
  const bool built_in = std::ranges::count(builtin_models(), base) > 0 && is_missing(base);
  ModelSource source = built_in ? shape_of(base) : find_model(base, lookup);
  if (run != nullptr && !source.loads_weights()) source.random_seed = run->manifest().seed;
  return source;
}

/// The base that an adapter names. `lookup`: of the adapter's folder.
ModelSource base_of(const AdapterSource& adapter, const ModelLookup& lookup) {
  refuse_adapter_of_adapter(adapter.folder(), lookup);
  const std::string what = typed_name(adapter.folder(), lookup);
  const std::string base = lookup.base_at.empty() ? adapter.description().base : lookup.base_at;
  if (base.empty()) {
    const std::string folder = adapter.folder().string();
    throw UsageError(what, "it holds an adapter that does not name its base",
                     lookup.command.empty() || lookup.above > 0
                         ? fmt::format("name the base by --model, and give this with --adapter {}", folder)
                         : fmt::format("tandem {} {} --model DIR names it", lookup.command, folder));
  }
  const bool random = adapter.checkpoint() != nullptr && std::ranges::count(builtin_models(), base) > 0;
  if (lookup.base_at.empty() && is_missing(base) && !random) {
    refuse_missing_base(adapter.folder(), base, /*is_adapter=*/true, lookup);
  }
  ModelSource source = find_base(base, adapter.checkpoint(), beneath(lookup, what, what));
  if (adapter.checkpoint() != nullptr) check_function(*adapter.checkpoint(), source.config);
  return source;
}

/// A checkpoint of trained parameters, on top of the model that has the others: the one that it names, or random
/// weights by its seed.
ModelSource over_base(std::unique_ptr<Checkpoint> checkpoint, const ModelLookup& lookup) {
  const Manifest& manifest = checkpoint->manifest();
  const std::string base = lookup.base_at.empty() ? manifest.base : lookup.base_at;
  ModelSource source;
  if (base.empty()) {
    source.config = config_of(*checkpoint);
    source.random_seed = manifest.seed;
  } else {
    if (lookup.base_at.empty() && is_missing(base)) {
      refuse_missing_base(checkpoint->directory(), base, /*is_adapter=*/false, lookup);
    }
    source = find_base(base, checkpoint.get(), beneath(lookup, typed_name(checkpoint->directory(), lookup)));
    source.config.lora.reset();
    source.adapter.reset();  // one that has come into the folder since
    check_function(*checkpoint, source.config);
  }
  source.base = checkpoint->directory().string();
  source.on_top.push_back(std::move(checkpoint));
  return source;
}

/// A checkpoint that holds the model itself, the trained parameters of one, or its adapters.
ModelSource from_checkpoint(std::unique_ptr<Checkpoint> checkpoint, const ModelLookup& lookup) {
  ModelSource source;
  ModelConfig config = config_of(*checkpoint);
  const bool bytes = checkpoint->manifest().token_kind == "bytes";
  const std::vector<fs::path> beside = checkpoint->files_beside();
  if (checkpoint->manifest().base_format.empty()) {
    source.config = std::move(config);
    source.base = checkpoint->directory().string();
    source.checkpoint = std::move(checkpoint);
  } else if (checkpoint->manifest().adapter.empty()) {
    source = over_base(std::move(checkpoint), lookup);
  } else {
    auto adapter = std::make_shared<const AdapterSource>(std::move(checkpoint));
    source = base_of(*adapter, lookup);
    put_on_top(source, std::move(adapter));
  }
  source.bytes = bytes;
  source.beside = {beside.begin(), beside.end()};
  return source;
}

ModelSource from_config_file(const fs::path& file) {
  StoredDescription read = read_description(file);
  ModelSource source;
  source.config = std::move(read.description.config);
  source.bytes = read.description.token_kind == "bytes";
  source.config.stored_code = read.code;
  return source;
}

/// Throws where weights lie there that are not read, and random ones would be trained in their place.
void refuse_foreign_weights(const fs::path& directory, const ModelLookup& lookup) {
  const auto foreign = foreign_weights_in(directory);
  if (!foreign) return;
  throw InputError(fmt::format("model {}", directory.string()),
                   fmt::format("it holds {} ({}) and no safetensors{}", foreign->file, foreign->format,
                               lookup.trains ? ", without which random weights would be trained" : ""),
                   foreign->advice + (lookup.trains ? "; --from-scratch trains random weights" : ""));
}

[[noreturn]] void refuse_folder(const fs::path& directory, std::string_view typed) {
  refuse_several_adapters(directory, typed);
  const auto foreign = foreign_weights_in(directory);
  throw UsageError(fmt::format("{} {}", typed, directory.string()),
                   foreign ? fmt::format("a folder without config.json or checkpoints; it holds {} ({})", foreign->file,
                                         foreign->format)
                           : "a folder without config.json or checkpoints",
                   foreign ? foreign->advice : "name a Hugging Face directory, a checkpoint or a run");
}

/// `files`: those of its tensors where they were found already; null: not yet.
ModelSource from_directory(const fs::path& directory, const ModelLookup& lookup,
                           std::shared_ptr<HfWeightFiles> files = {}) {
  if (is_checkpoint(directory)) return from_checkpoint(std::make_unique<Checkpoint>(directory), lookup);
  if (fs::is_directory(directory / "checkpoints")) {
    auto newest = newest_checkpoint(directory / "checkpoints",
                                    [](const fs::path&, const std::string& why) { spdlog::warn("{}", why); });
    if (!newest) throw InputError(fmt::format("run {}", directory.string()), "it holds no good checkpoint");
    ModelLookup of_run = lookup;
    of_run.folder = directory.string();
    return from_checkpoint(std::move(newest), of_run);
  }
  const bool is_described = fs::exists(directory / "config.json");
  std::shared_ptr<const AdapterSource> adapter;
  if (is_peft_folder(directory) && !(is_described && lookup.from_scratch)) {
    adapter = std::make_shared<const AdapterSource>(directory);
  }
  if (adapter && !is_described) {
    ModelSource source = base_of(*adapter, lookup);
    put_on_top(source, std::move(adapter));
    source.beside = files_with_adapter(std::move(source.beside), directory);
    return source;
  }
  if (adapter) refuse_adapter_of_adapter(directory, lookup);
  if (!is_described) refuse_folder(directory, lookup.typed);
  ModelSource source = from_config_file(directory / "config.json");
  if (!files) files = std::make_shared<HfWeightFiles>(directory);
  if (!files->files().empty()) source.weights = std::move(files);
  if (!source.weights && !lookup.from_scratch) refuse_foreign_weights(directory, lookup);
  if (source.config.is_multimodal) {
    spdlog::warn("model {}: its vision tensors are left out, also of what is saved or exported; it is taken as {}",
                 directory.string(), source.config.architecture);
  }
  source.beside = files_beside_weights(directory);
  source.base = directory.string();
  if (adapter) put_on_top(source, std::move(adapter));
  return source;
}

/// A config.json by whatever name; not a file of weights.
ModelSource from_file(const fs::path& file, const ModelLookup& lookup) {
  const auto foreign = foreign_weights_of_name(file);
  if (!foreign && file.extension() != ".safetensors") return from_config_file(file);
  throw UsageError(
      fmt::format("{} {}", lookup.typed, file.string()),
      fmt::format("a file of weights ({}), which is no model description", foreign ? foreign->format : "safetensors"),
      foreign ? foreign->advice
              : fmt::format("name its folder, {}", file.has_parent_path() ? file.parent_path().string() : "."));
}

/// Parts that a snapshot in the hub's cache lacks, in words; empty where it is whole. `files`: set where it has looked
/// for those of its tensors.
std::string lacking(const fs::path& snapshot, bool from_scratch, std::shared_ptr<HfWeightFiles>& files) {
  if (!fs::exists(snapshot / "config.json")) return "config.json";
  if (from_scratch || foreign_weights_in(snapshot)) return {};  // weights in another format are told as such
  files = std::make_shared<HfWeightFiles>(snapshot);
  for (const fs::path& file : files->files()) {
    if (!fs::exists(file)) return file.filename().string();
  }
  return files->files().empty() ? "*.safetensors" : "";
}

ModelSource from_hub_cache(const std::string& name, const ModelLookup& lookup) {
  const std::string what = fmt::format("{} {}", lookup.typed, name);
  const auto snapshot = cached_snapshot(name);
  if (!snapshot) {
    const std::vector<std::string> near = nearest_folders(name);
    const std::string perhaps = near.empty() ? std::string() : fmt::format("perhaps {}; ", fmt::join(near, ", "));
    throw UsageError(what,
                     fmt::format("neither a {}, nor a path that exists, nor in the hub's cache {}",
                                 lookup.trains ? "built-in shape" : "run", hub_cache().string()),
                     fmt::format("{}if it is a name of the hub: hf download {}", perhaps, name));
  }
  std::shared_ptr<HfWeightFiles> files;
  if (const std::string part = lacking(*snapshot, lookup.from_scratch, files); !part.empty()) {
    throw UsageError(what, fmt::format("it is not whole in the hub's cache: {} is not in {}", part, snapshot->string()),
                     fmt::format("hf download {}", name));
  }
  ModelSource source = from_directory(*snapshot, lookup, std::move(files));
  source.config.name = name.substr(name.find('/') + 1);
  source.base = name;
  spdlog::info("model {}: {} in the hub's cache", name, snapshot->string());
  return source;
}

[[noreturn]] void refuse_name(const std::string& name, const ModelLookup& lookup) {
  const std::vector<std::string> paths = nearest_folders(name);
  if (!lookup.trains) {
    throw UsageError(fmt::format("{} {}", lookup.typed, name), "there is no such path, and so no run or model",
                     paths.empty() ? "name a Hugging Face directory, a checkpoint or a run"
                                   : fmt::format("perhaps {}", fmt::join(paths, ", ")));
  }
  std::vector<std::string> near = nearest_shapes(name);
  near.insert(near.end(), paths.begin(), paths.end());
  throw UsageError(fmt::format("{} {}", lookup.typed, name), "neither a built-in shape nor a path that exists",
                   near.empty()
                       ? "tandem --list-models names the shapes"
                       : fmt::format("perhaps {}; tandem --list-models names the shapes", fmt::join(near, ", ")));
}

/// Throws where a path has the name of a built-in shape, unless it is the run's own folder.
void refuse_ambiguous(const std::string& name, const ModelLookup& lookup) {
  std::error_code ignored;
  if (!fs::exists(fs::symlink_status(name, ignored))) return;
  if (!lookup.out.empty() && fs::equivalent(name, lookup.out, ignored)) return;
  throw UsageError(
      fmt::format("{} {}", lookup.typed, name), "both a built-in shape and a path that is here",
      fmt::format("write ./{} for the path; for the shape, which starts from random weights, rename the path", name));
}

std::string listing(const std::vector<std::string>& names) {
  constexpr std::size_t shown = 5;
  const auto end = names.begin() + static_cast<std::ptrdiff_t>(std::min(shown, names.size()));
  std::string text = fmt::format("{}", fmt::join(names.begin(), end, ", "));
  return names.size() > shown ? text + fmt::format(" and {} more", names.size() - shown) : text;
}

void check_checkpoint(const Checkpoint& checkpoint, const ParameterLayout& layout) {
  const auto& stored = checkpoint.manifest().parameters;
  std::vector<std::string> wrong;
  for (const Parameter* p : layout.owned_parameters()) {
    const auto found =
        std::find_if(stored.begin(), stored.end(), [&](const auto& s) { return s.name == p->full_name; });
    if (found == stored.end() || found->count() != p->count) wrong.push_back(p->full_name);
  }
  if (wrong.empty() && stored.size() == layout.owned_parameters().size()) return;
  throw InputError(fmt::format("checkpoint {}", checkpoint.directory().string()),
                   wrong.empty() ? "it has parameters that the model lacks"
                                 : fmt::format("missing or misshapen: {}", listing(wrong)),
                   "use the model it was saved from");
}

ModelSource look_up(const std::string& name, const ModelLookup& lookup) {
  const auto builtin = builtin_models();
  if (std::find(builtin.begin(), builtin.end(), name) != builtin.end()) {
    refuse_ambiguous(name, lookup);
    return shape_of(name);
  }
  std::error_code error;
  if (fs::is_directory(name, error)) return from_directory(name, lookup);
  if (fs::exists(name, error)) return from_file(name, lookup);
  if (is_hub_name(name)) return from_hub_cache(name, lookup);
  refuse_name(name, lookup);
}

}  // namespace

ModelSource find_model(const std::string& name, const ModelLookup& lookup) {
  ModelSource source = look_up(name, lookup);
  std::error_code ignored;
  const bool on_a_base =
      !source.on_top.empty() || (source.adapter && !fs::exists(source.adapter->folder() / "config.json", ignored));
  if (lookup.base_at.empty() || on_a_base) return source;
  throw UsageError(fmt::format("--model {}", lookup.base_at),
                   fmt::format("it says where the base of {} is, which is a whole model", name),
                   "leave one of them out");
}

void ModelSource::close_weights() const {
  if (weights) weights->close();
}

ModelSource find_trained_model(const std::string& name, const ModelLookup& lookup) {
  ModelSource source = find_model(name, lookup);
  if (!source.loads_weights()) {
    throw UsageError(
        lookup.base_at.empty() ? fmt::format("{} {}", lookup.typed, name) : fmt::format("--model {}", lookup.base_at),
        "it has no weights", "name a Hugging Face directory with *.safetensors, a checkpoint or a run directory");
  }
  return source;
}

namespace {

/// Passes values on, and says where some are not finite: training from them would skip every step.
ParameterValues watched(ParameterValues values) {
  return [values = std::move(values), bad = std::ptrdiff_t{0}](const Parameter& p, std::int64_t first,
                                                               std::span<float> to) mutable {
    values(p, first, to);
    bad = (first == 0 ? 0 : bad) + std::count_if(to.begin(), to.end(), [](float x) { return !std::isfinite(x); });
    const bool last = first + static_cast<std::int64_t>(to.size()) == p.count;
    if (bad > 0 && last) spdlog::warn("weights of {}: {} of {} values are NaN or infinite", p.full_name, bad, p.count);
  };
}

}  // namespace

namespace {

/// Throws UsageError where a flag says something else of an adapter than its own description.
void refuse_contradiction(std::string_view flag, const std::string& typed, const std::string& own,
                          const AdapterSource& adapter) {
  if (typed == own) return;
  throw UsageError(fmt::format("{} {}", flag, typed),
                   fmt::format("the adapter {} has {}", adapter.folder().string(), own), "leave the flag out");
}

/// Whether options choose the same adapters, for a model that may not allow them.
bool chooses(const ModelConfig& model, const LoraOptions& options, const LoraConfig& same) {
  try {
    return lora_config(model, options, "--lora-targets").modules == same.modules;
  } catch (const UsageError&) {
    return false;
  }
}

/// Description of an adapter, with what flags add to it.
LoraOptions options_of(const LoraOptions& typed, const ModelConfig& model, const AdapterSource& adapter) {
  LoraOptions options = adapter.description().options;
  const auto compare = [&](std::string_view flag, const auto& value, const auto& own) {
    refuse_contradiction(flag, fmt::format("{}", value), fmt::format("{}", own), adapter);
  };
  if (typed.rank > 0) compare("--lora-rank", typed.rank, options.rank);
  if (typed.alpha) compare("--lora-alpha", *typed.alpha, options.alpha_or_default());
  if (typed.rank_stabilized) compare("--lora-rslora", *typed.rank_stabilized, options.rank_stabilized.value_or(false));
  if (!typed.modules_to_save.empty()) {
    auto names = typed.modules_to_save;
    std::ranges::sort(names);
    compare("--lora-modules-to-save", fmt::format("{}", fmt::join(names, ",")),
            fmt::format("{}", fmt::join(options.modules_to_save, ",")));
  }
  if (typed.dropout) options.dropout = typed.dropout;
  const LoraConfig own = lora_config(model, options, targets_of(adapter));
  const auto compare_modules = [&](std::string_view flag, std::string LoraOptions::*names) {
    if ((typed.*names).empty()) return;
    LoraOptions with_typed = options;
    with_typed.*names = typed.*names;
    if (!chooses(model, with_typed, own)) refuse_contradiction(flag, typed.*names, options.*names, adapter);
  };
  compare_modules("--lora-targets", &LoraOptions::targets);
  compare_modules("--lora-experts", &LoraOptions::experts);
  return options;
}

}  // namespace

void take_patterns(TrainConfig& config, const Checkpoint& checkpoint) {
  const std::string& text = checkpoint.manifest().adapter;
  if (text.empty()) return;
  const LoraOptions stored = parse_peft_config(text, checkpoint.directory().string()).options;
  config.lora.rank_pattern = stored.rank_pattern;
  config.lora.alpha_pattern = stored.alpha_pattern;
}

void take_adapters(TrainConfig& config, ModelSource& source, bool opens) {
  if (!config.adapter.empty() && source.adapter) {
    throw UsageError(fmt::format("--adapter {}", config.adapter),
                     fmt::format("--model has an adapter of its own, {}", source.adapter->folder().string()),
                     fmt::format("give --model {} for its base", source.base));
  }
  if (!config.adapter.empty() && opens) {
    source.adapter = open_adapter(config.adapter, "--adapter");
    if (source.adapter->checkpoint() == nullptr) {
      source.beside = files_with_adapter(std::move(source.beside), source.adapter->folder());
    }
  }
  if (source.adapter) config.lora = options_of(config.lora, source.config, *source.adapter);
  if (config.lora.rank == 0) return;
  if (!config.freeze.empty()) {
    throw UsageError(fmt::format("--freeze {}", config.freeze), "with adapters nothing else is trained anyway",
                     "leave it out");
  }
  source.config.lora = lora_config(source.config, config.lora,
                                   source.adapter ? targets_of(*source.adapter) : std::string("--lora-targets"));
  source.config.lora->seed = config.seed;
}

void check_weights(const ModelSource& source, const ParameterLayout& layout) {
  static_cast<void>(initial_values(source, layout, 0));
}

namespace {

/// Values of the model as its own weights have them.
ParameterValues stored_values(const ModelSource& source, const ParameterLayout& layout, std::uint64_t seed,
                              Parallel* threads) {
  if (source.checkpoint) {
    check_checkpoint(*source.checkpoint, layout);
    return watched(
        [checkpoint = source.checkpoint.get()](const Parameter& p, std::int64_t first, std::span<float> values) {
          checkpoint->read(checkpoint->index_of(p.full_name), StateArray::master, first, values);
        });
  }
  if (source.weights) {
    const auto weights = source.weights->weights();
    weights->check(source.config, layout);
    return watched([weights, config = source.config](const Parameter& p, std::int64_t first, std::span<float> values) {
      weights->read(config, p, first, values);
    });
  }
  return [config = source.config, seed = source.random_seed.value_or(seed), threads](
             const Parameter& p, std::int64_t first, std::span<float> values) {
    initialize_parameter(config, p, seed, first, values, threads);
  };
}

/// The values of a checkpoint that holds trained parameters alone, on top of others, whose hashes are checked.
ParameterValues on_top_of(ParameterValues below, std::shared_ptr<const Checkpoint> top, const ParameterLayout& layout) {
  check_checkpoint(*top, layout);
  const auto lies_below = [top](const Parameter& p) {
    return !top->manifest().parameters[top->index_of(p.full_name)].elsewhere.empty();
  };
  below = hashing(std::move(below), lies_below,
                  [top](const Parameter& p, const std::string& hash) { check_base(*top, p, hash); });
  return watched([=](const Parameter& p, std::int64_t first, std::span<float> values) {
    if (lies_below(p)) return below(p, first, values);
    top->read(top->index_of(p.full_name), StateArray::master, first, values);
  });
}

/// Values of the model's own parameters.
ParameterValues base_values(const ModelSource& source, const ParameterLayout& layout, std::uint64_t seed,
                            Parallel* threads) {
  ParameterValues values = stored_values(source, layout, seed, threads);
  for (const auto& top : source.on_top) values = on_top_of(std::move(values), top, layout);
  return values;
}

}  // namespace

ParameterValues initial_values(const ModelSource& source, const ParameterLayout& layout, std::uint64_t seed,
                               Parallel* threads) {
  if (!source.config.lora) return base_values(source, layout, seed, threads);
  const ModelConfig plain = without_adapters(source.config);
  ParameterValues base = base_values(source, base_layout(plain, layout), seed, threads);
  if (source.adapter) source.adapter->check(source.config, layout);
  if (source.adapter && source.adapter->checkpoint() != nullptr) {
    const auto is_frozen = [](const Parameter& p) { return !p.options.trainable; };
    base = hashing(std::move(base), is_frozen, [adapter = source.adapter](const Parameter& p, const std::string& hash) {
      check_base(*adapter->checkpoint(), p, hash);
    });
  }
  const ParameterValues adapted = watched(
      [adapter = source.adapter, config = source.config](const Parameter& p, std::int64_t first, std::span<float> to) {
        adapter->read(config, p, first, to);
      });
  return [base = std::move(base), adapted, adapter = source.adapter, config = source.config, seed, threads](
             const Parameter& p, std::int64_t first, std::span<float> values) {
    if (adapter && adapter->holds(config, p)) {
      adapted(p, first, values);
    } else if (is_adapter(p)) {
      initialize_parameter(config, p, seed, first, values, threads);
    } else {
      base(p, first, values);
    }
  };
}

void check_adapter(const ModelSource& source, const ParameterLayout& layout) {
  if (!source.adapter) return;
  source.adapter->check(source.config, layout);
  const bool has_values = source.loads_weights() && source.config.stored_code == WeightCode::none;
  if (source.adapter->checkpoint() == nullptr || !has_values) return;
  const Parameter* smallest = nullptr;  // norms may be all ones in any model
  for (const Parameter* p : layout.owned_parameters()) {
    if (p->options.trainable || p->shape.rank() < 2) continue;
    if (smallest == nullptr || p->count < smallest->count) smallest = p;
  }
  if (smallest == nullptr) return;
  std::vector<float> values(static_cast<std::size_t>(smallest->count));
  initial_values(source, layout, 0)(*smallest, 0, values);  // compares its hash
}

ParameterCodes initial_codes(const ModelSource& source) {
  if (!source.weights || source.config.stored_code == WeightCode::none)
    return [](const Parameter&, CodeSink&) { return false; };
  const auto weights = source.weights->weights();
  return [weights, plain = without_adapters(source.config)](const Parameter& p, CodeSink& sink) {
    return weights->read_codes(plain, p, sink);
  };
}

}  // namespace tandem
