#include "train/loop/run_facts.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>

#include "core/base/hash128.hpp"
#include "core/base/version.hpp"
#include "io/checkpoint.hpp"
#include "models/hf/hf_config.hpp"
#include "train/hf/adapter_source.hpp"
#include "train/hf/hf_weights.hpp"
#include "train/loop/prepared_run.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;

/// Keys of the configuration that may differ: places of files, and what is said of a run. Files are compared by what
/// they hold.
constexpr std::array<std::string_view, 13> free_keys = {
    "model",           "data",    "mix",       "eval-data", "out", "trace", "state-dir", "log-every", "metrics-port",
    "metrics-address", "adapter", "numa-node", "device"};

/// A file by its size and some of its bytes: at its beginning, where safetensors list what they hold, in the middle and
/// at its end.
void add_samples(Hash128& hash, const fs::path& name) {
  constexpr std::uintmax_t sample = 1 << 16;
  std::error_code error;
  const std::uintmax_t size = fs::file_size(name, error);
  const std::string line = fmt::format("{} {}\n", name.filename().string(), error ? 0 : size);
  hash.add(line.data(), line.size());
  if (error) return;
  std::ifstream file(name, std::ios::binary);
  std::string bytes(sample, '\0');
  for (const std::uintmax_t at : {std::uintmax_t{0}, size / 2, size - std::min(size, sample)}) {
    file.seekg(static_cast<std::streamoff>(at));
    file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    hash.add(bytes.data(), static_cast<std::size_t>(file.gcount()));
    file.clear();
  }
}

std::string hash_of(const std::string& text) {
  Hash128 hash;
  hash.add(text.data(), text.size());
  return hash.text();
}

/// A model by what its description says, whatever its folder is called.
std::string model_of(const ModelConfig& config) {
  return fmt::format("{} of {} layers, {}", config.architecture, config.layers,
                     hash_of(hf_config_text(config, "float32")));
}

/// Weights that the run begins with.
std::string start_of(const PreparedRun& run) {
  const ModelSource& source = run.source;
  if (run.checkpoint) {
    const Manifest& manifest = run.checkpoint->manifest();
    return fmt::format("checkpoint of step {}, {}", manifest.step, manifest.state_digest);
  }
  Hash128 hash;
  if (source.adapter && source.adapter->checkpoint() != nullptr) {
    const std::string& digest = source.adapter->checkpoint()->manifest().state_digest;
    hash.add(digest.data(), digest.size());
  } else if (source.adapter) {
    add_samples(hash, source.adapter->folder() / "adapter_model.safetensors");
  }
  if (source.weights) {
    std::vector<fs::path> files = source.weights->files();
    std::ranges::sort(files);
    for (const fs::path& file : files) add_samples(hash, file);
    return "files " + hash.text();
  }
  if (source.checkpoint) return fmt::format("checkpoint {}", source.checkpoint->manifest().state_digest);
  return fmt::format("random {}", hash.text());
}

}  // namespace

std::vector<Fact> facts_of(const TrainConfig& config) {
  std::vector<Fact> facts{{"version", std::string(version)}};
  std::istringstream lines(config_toml(config));
  for (std::string line; std::getline(lines, line);) {
    const std::size_t equals = line.find(" = ");
    if (line.starts_with('#') || equals == line.npos) continue;
    const std::string key = line.substr(0, equals);
    if (std::ranges::find(free_keys, key) != free_keys.end()) continue;
    facts.push_back({"--" + key, line.substr(equals + 3)});
  }
  return facts;
}

std::vector<Fact> facts_of(const PreparedRun& run) {
  const RunSetup& setup = run.setup;
  std::string shares;
  for (const double share : run.data.shares) shares += fmt::format(" {}", share);
  return {
      {"model", model_of(setup.model_config)},
      {"weights at the start", start_of(run)},
      {"data", fmt::format("{} {} in shares{}", run.data.sources.size(), run.data.digest(), shares)},
      {"--eval-data", run.eval_data ? run.eval_data->digest() : "none"},
      {"--steps", std::to_string(run.config().steps)},
      {"--lr", fmt::format("{}", *run.config().lr)},
      {"compute_key", setup.compute_key()}};
}

}  // namespace tandem
