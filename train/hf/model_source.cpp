#include "train/hf/model_source.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/json_text.hpp"
#include "models/hf/hf_config.hpp"
#include "models/transformer/transformer.hpp"
#include "offload/engine/state_io.hpp"
#include "train/config/name_pattern.hpp"
#include "train/hf/hf_weights.hpp"
#include "train/hf/model_folder.hpp"
#include "train/hf/model_names.hpp"
#include "train/hf/quantized_config.hpp"
#include "train/hf/tokenizer_files.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;

ModelConfig config_of(const Checkpoint& checkpoint) {
  const Manifest& manifest = checkpoint.manifest();
  if (manifest.model_name.empty() && manifest.model_config == "{}") {  // saved by OffloadEngine::save
    throw InputError(fmt::format("checkpoint {}", checkpoint.directory().string()),
                     "a trainer of its own has saved it, and its manifest names no model",
                     "OffloadEngine::load reads it, and tandem digest");
  }
  try {
    return parse_hf_config(manifest.model_config, manifest.model_name);
  } catch (const UsageError& error) {
    throw InputError(fmt::format("checkpoint {}", checkpoint.directory().string()), error.what(),
                     "use another one of the run");
  }
}

ModelSource from_checkpoint(std::unique_ptr<Checkpoint> checkpoint) {
  ModelSource source;
  source.config = config_of(*checkpoint);
  source.bytes = checkpoint->manifest().token_kind == "bytes";
  const std::vector<fs::path> beside = checkpoint->files_beside();
  source.beside = {beside.begin(), beside.end()};
  source.checkpoint = std::move(checkpoint);
  return source;
}

ModelSource from_config_file(const fs::path& file) {
  StoredDescription read = read_description(file);
  ModelSource source;
  source.config = std::move(read.description.config);
  source.bytes = read.description.token_kind == "bytes";
  source.stored_code = read.code;
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
  if (is_checkpoint(directory)) return from_checkpoint(std::make_unique<Checkpoint>(directory));
  if (fs::is_directory(directory / "checkpoints")) {
    auto newest = newest_checkpoint(directory / "checkpoints",
                                    [](const fs::path&, const std::string& why) { spdlog::warn("{}", why); });
    if (!newest) throw InputError(fmt::format("run {}", directory.string()), "it holds no good checkpoint");
    return from_checkpoint(std::move(newest));
  }
  const bool is_described = fs::exists(directory / "config.json");
  if (!is_described || !lookup.from_scratch) refuse_adapter(directory, lookup.typed);
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
  const std::string advice = fmt::format("if it is a name of the hub: hf download {}", name);
  const auto snapshot = cached_snapshot(name);
  if (!snapshot) {
    throw UsageError(what,
                     fmt::format("neither a built-in shape, nor a path that exists, nor in the hub's cache {}",
                                 hub_cache().string()),
                     advice);
  }
  std::shared_ptr<HfWeightFiles> files;
  if (const std::string part = lacking(*snapshot, lookup.from_scratch, files); !part.empty()) {
    throw UsageError(what, fmt::format("it is not whole in the hub's cache: {} is not in {}", part, snapshot->string()),
                     fmt::format("hf download {}", name));
  }
  ModelSource source = from_directory(*snapshot, lookup, std::move(files));
  source.config.name = name.substr(name.find('/') + 1);
  spdlog::info("model {}: {} in the hub's cache", name, snapshot->string());
  return source;
}

[[noreturn]] void refuse_name(const std::string& name, const ModelLookup& lookup) {
  if (!lookup.trains) {
    throw UsageError(fmt::format("{} {}", lookup.typed, name), "there is no such path",
                     "name a Hugging Face directory, a checkpoint or a run");
  }
  const std::vector<std::string> near = nearest_shapes(name);
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

}  // namespace

ModelSource find_model(const std::string& name, const ModelLookup& lookup) {
  const auto builtin = builtin_models();
  if (std::find(builtin.begin(), builtin.end(), name) != builtin.end()) {
    refuse_ambiguous(name, lookup);
    ModelSource source;
    source.config = builtin_model(name);
    return source;
  }
  std::error_code error;
  if (fs::is_directory(name, error)) return from_directory(name, lookup);
  if (fs::exists(name, error)) return from_file(name, lookup);
  if (is_hub_name(name)) return from_hub_cache(name, lookup);
  refuse_name(name, lookup);
}

void ModelSource::close_weights() const {
  if (weights) weights->close();
}

ModelSource find_trained_model(const std::string& name, std::string_view typed) {
  ModelSource source = find_model(name, {.typed = typed, .trains = false});
  if (!source.loads_weights()) {
    throw UsageError(fmt::format("{} {}", typed, name), "it has no weights",
                     "name a Hugging Face directory with *.safetensors, a checkpoint or a run directory");
  }
  return source;
}

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

/// `plain`, the model's layout, with `frozen(Hugging Face name)` deciding what is not trained.
template <class Frozen>
ParameterLayout layout_with(const ModelConfig& config, const ParameterLayout& plain, const Frozen& frozen,
                            std::size_t& trained) {
  ParameterLayout layout;
  for (const Layer& layer : plain.layers()) {
    auto builder = layout.add_layer(layer.name);
    for (const Parameter& p : layer.parameters) {
      ParameterOptions options = p.options;
      if (!p.tied()) {
        options.trainable = !all_frozen(config, p, frozen);
        trained += options.trainable ? 1 : 0;
      }
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

/// Keys of config.json that describe the function that the model computes: without names, initial values and storage of
/// weights, generation, and the longest sequence, which shapes tell where it matters.
nlohmann::json keys_of_the_function(const ModelConfig& config) {
  nlohmann::json json = parse_json<nlohmann::json>(hf_config_text(config, "float32"));
  for (const char* key :
       {"architectures", "model_type", "torch_dtype", "initializer_range", "max_position_embeddings"}) {
    json.erase(key);
  }
  for (const auto& [key, value] : config.passed_on) json.erase(key);
  json["rope_magnitude"] =
      rope_magnitude(config, config.rope(/*windowed=*/false));  // may come of how long sequences may be
  json["norm_offset"] = config.norm_offset;
  return json;
}

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

ParameterLayout frozen_layout(const ModelConfig& config, const std::string& pattern, DType ends) {
  ParameterLayout plain = layout_of(config, DType::bf16, ends);
  if (pattern.empty()) return plain;
  const std::regex expression = name_pattern(pattern);
  std::size_t trained = 0;
  ParameterLayout layout = layout_with(
      config, plain, [&](const std::string& name) { return std::regex_search(name, expression); }, trained);
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

ParameterLayout forward_layout(const ModelConfig& config) {
  std::size_t ignored = 0;
  return layout_with(
      config, layout_of(config), [](const std::string&) { return true; }, ignored);
}

void check_resumable(const Checkpoint& checkpoint, const ModelConfig& config, const ParameterLayout& layout,
                     StateFormat state) {
  check_belongs(checkpoint, layout, state);
  const auto stored = keys_of_the_function(config_of(checkpoint));
  const auto given = keys_of_the_function(config);
  nlohmann::json all = given;
  all.update(stored);
  for (const auto& [key, any] : all.items()) {
    const nlohmann::json saved = stored.value(key, nlohmann::json()), value = given.value(key, nlohmann::json());
    if (saved == value) continue;
    throw InputError(fmt::format("checkpoint {}", checkpoint.directory().string()),
                     fmt::format("it was made with {} {}, the model has {}", key, json_text(saved), json_text(value)),
                     "resume with the model it was saved with");
  }
}

void check_weights(const ModelSource& source, const ParameterLayout& layout) {
  static_cast<void>(initial_values(source, layout, 0));
}

ParameterValues initial_values(const ModelSource& source, const ParameterLayout& layout, std::uint64_t seed,
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
  return [config = source.config, seed, threads](const Parameter& p, std::int64_t first, std::span<float> values) {
    initialize_parameter(config, p, seed, first, values, threads);
  };
}

ParameterCodes initial_codes(const ModelSource& source, const ParameterLayout& layout) {
  if (!source.weights) return [](const Parameter&, CodeSink&) { return false; };
  const auto weights = source.weights->weights();
  weights->check(source.config, layout);
  return [weights, config = source.config](const Parameter& p, CodeSink& sink) {
    return weights->read_codes(config, p, sink);
  };
}

}  // namespace tandem
