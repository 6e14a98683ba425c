#include "train/model_source.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <system_error>

#include "core/error.hpp"
#include "models/transformer.hpp"
#include "train/hf_weights.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;

/// config.json of a checkpoint is text in its manifest; the reader of models takes files.
ModelConfig config_of_checkpoint(const Checkpoint& checkpoint) {
  std::string pattern = (fs::temp_directory_path() / "tandem-config-XXXXXX").string();
  const int fd = ::mkstemp(pattern.data());
  if (fd < 0) throw WriteError("cannot write a temporary file", "the temporary folder refuses it", "set TMPDIR");
  ::close(fd);
  const struct Remove {
    const std::string& path;
    ~Remove() {
      std::error_code ignored;
      fs::remove(path, ignored);
    }
  } remove{pattern};
  std::ofstream(pattern) << checkpoint.manifest().model_config;
  ModelConfig config = read_hf_config(pattern);
  config.name = checkpoint.manifest().model_name;
  return config;
}

ModelSource from_checkpoint(std::unique_ptr<Checkpoint> checkpoint) {
  ModelSource source;
  source.config = config_of_checkpoint(*checkpoint);
  source.bytes = checkpoint->manifest().token_kind == "bytes";
  source.checkpoint = std::move(checkpoint);
  return source;
}

ModelSource from_config_file(const fs::path& file) {
  ModelSource source;
  source.config = read_hf_config(file);
  std::ifstream stream(file);
  const auto json = nlohmann::json::parse(stream, nullptr, false);
  source.bytes = json.is_object() && json.value("tandem_token_kind", "") == "bytes";
  return source;
}

ModelSource from_directory(const fs::path& directory) {
  if (is_checkpoint(directory)) return from_checkpoint(std::make_unique<Checkpoint>(directory));
  if (fs::is_directory(directory / "checkpoints")) {
    auto newest = newest_checkpoint(directory / "checkpoints",
                                    [](const fs::path&, const std::string& why) { spdlog::warn("{}", why); });
    if (!newest) throw InputError(fmt::format("run {}", directory.string()), "it holds no good checkpoint");
    return from_checkpoint(std::move(newest));
  }
  if (!fs::exists(directory / "config.json")) {
    throw UsageError(fmt::format("--model {}", directory.string()), "a folder without config.json or checkpoints",
                     "name a Hugging Face directory, a checkpoint or a run");
  }
  ModelSource source = from_config_file(directory / "config.json");
  if (HfWeights::present(directory)) source.weights = directory;
  return source;
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

ModelSource find_model(const std::string& name) {
  const auto builtin = builtin_models();
  if (std::find(builtin.begin(), builtin.end(), name) != builtin.end()) {
    ModelSource source;
    source.config = builtin_model(name);
    return source;
  }
  std::error_code error;
  if (fs::is_directory(name, error)) return from_directory(name);
  if (fs::exists(name, error)) return from_config_file(name);
  throw UsageError(fmt::format("--model {}", name), "neither a built-in shape nor a path that exists",
                   "tandem --list-models names the shapes");
}

ModelSource find_trained_model(const std::string& name) {
  ModelSource source = find_model(name);
  if (!source.loads_weights()) {
    throw UsageError(fmt::format("--model {}", name), "it has no weights",
                     "name a Hugging Face directory with *.safetensors, a checkpoint or a run directory");
  }
  return source;
}

ParameterLayout frozen_layout(const ModelConfig& config, const std::string& pattern) {
  const ParameterLayout plain = layout_of(config);
  if (pattern.empty()) return plain;
  const std::regex expression(pattern);
  ParameterLayout frozen;
  std::size_t trained = 0;
  for (const Layer& layer : plain.layers()) {
    auto builder = frozen.add_layer(layer.name);
    for (const Parameter& p : layer.parameters) {
      ParameterOptions options = p.options;
      if (!p.tied()) {
        options.trainable = !std::regex_search(hf_tensor_of(config, p).name, expression);
        trained += options.trainable ? 1 : 0;
      }
      builder.add(p.name, p.shape, options);
    }
  }
  for (const Layer& layer : plain.layers()) {
    for (const Parameter& p : layer.parameters) {
      if (!p.tied()) continue;
      const Layer& owner = plain.layer(p.tied_layer);
      frozen.tie(owner.parameters.at(static_cast<std::size_t>(p.tied_index)).full_name, p.full_name);
    }
  }
  if (trained == 0 && pattern != ".*")
    throw UsageError(fmt::format("--freeze {}", pattern), "it freezes every parameter");
  return frozen;
}

ParameterValues initial_values(const ModelSource& source, const ParameterLayout& layout, std::uint64_t seed) {
  if (source.checkpoint) {
    check_checkpoint(*source.checkpoint, layout);
    return [checkpoint = source.checkpoint.get()](const Parameter& p, std::span<float> values) {
      checkpoint->read(checkpoint->index_of(p.full_name), StatePart::master, values);
    };
  }
  if (!source.weights.empty()) {
    auto weights = std::make_shared<HfWeights>(source.weights);
    weights->check(source.config, layout);
    return [weights, config = source.config](const Parameter& p, std::span<float> values) {
      weights->read(config, p, values);
    };
  }
  return [config = source.config, seed](const Parameter& p, std::span<float> values) {
    initialize_parameter(config, p, seed, values);
  };
}

}  // namespace tandem
