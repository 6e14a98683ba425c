#include "io/checkpoint.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <system_error>

#include "core/error.hpp"
#include "core/state_digest.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* manifest_name = "manifest.json";
constexpr const char* state_name = "state.safetensors";
constexpr const char* prefixes[state_parts] = {"master.", "m.", "v."};

int parts_of(const CheckpointParameter& parameter) { return parameter.trainable ? state_parts : 1; }

std::vector<TensorSpec> specs_of(const std::vector<CheckpointParameter>& parameters) {
  std::vector<TensorSpec> specs;
  for (const auto& parameter : parameters) {
    for (int part = 0; part < parts_of(parameter); ++part) {
      specs.push_back({prefixes[part] + parameter.name, "F32", parameter.shape});
    }
  }
  return specs;
}

json to_json(const Manifest& m, const json& files) {
  json parameters = json::array();
  for (const auto& p : m.parameters) {
    parameters.push_back({{"name", p.name}, {"shape", p.shape}, {"trainable", p.trainable}});
  }
  return {{"format", Manifest::format},
          {"tandem_version", m.tandem_version},
          {"model", m.model_name},
          {"model_config", json::parse(m.model_config)},
          {"token_kind", m.token_kind},
          {"compute_key", m.compute_key},
          {"schedule", m.schedule},
          {"plan", m.plan.empty() ? json(nullptr) : json::parse(m.plan)},
          {"state_digest", m.state_digest},
          {"step", m.step},
          {"adam_step", m.adam_step},
          {"skipped_steps", m.skipped_steps},
          {"tokens", m.tokens},
          {"first_loss", m.first_loss ? json(*m.first_loss) : json(nullptr)},
          {"last_loss", m.last_loss ? json(*m.last_loss) : json(nullptr)},
          {"seed", m.seed},
          {"sampler", {{"windows", m.sampler_windows}, {"epoch", m.sampler_epoch}, {"position", m.sampler_position}}},
          {"parameters", parameters},
          {"files", files}};
}

std::optional<double> optional_number(const json& value) {
  return value.is_null() ? std::nullopt : std::optional<double>(value.get<double>());
}

Manifest from_json(const json& j) {
  Manifest m;
  m.tandem_version = j.at("tandem_version").get<std::string>();
  m.model_name = j.at("model").get<std::string>();
  m.model_config = j.at("model_config").dump(2);
  m.token_kind = j.at("token_kind").get<std::string>();
  m.compute_key = j.at("compute_key").get<std::string>();
  m.schedule = j.at("schedule").get<std::string>();
  m.plan = j.at("plan").is_null() ? "" : j.at("plan").dump();
  m.state_digest = j.at("state_digest").get<std::string>();
  m.step = j.at("step").get<std::int64_t>();
  m.adam_step = j.at("adam_step").get<std::int64_t>();
  m.skipped_steps = j.at("skipped_steps").get<std::int64_t>();
  m.tokens = j.at("tokens").get<std::int64_t>();
  m.first_loss = optional_number(j.at("first_loss"));
  m.last_loss = optional_number(j.at("last_loss"));
  m.seed = j.at("seed").get<std::uint64_t>();
  m.sampler_windows = j.at("sampler").at("windows").get<std::int64_t>();
  m.sampler_epoch = j.at("sampler").at("epoch").get<std::int64_t>();
  m.sampler_position = j.at("sampler").at("position").get<std::int64_t>();
  for (const json& p : j.at("parameters")) {
    m.parameters.push_back({p.at("name").get<std::string>(), p.at("shape").get<std::vector<std::int64_t>>(),
                            p.at("trainable").get<bool>()});
  }
  return m;
}

[[noreturn]] void corrupt(const fs::path& directory, std::string_view why) {
  throw InputError(fmt::format("checkpoint {}", directory.string()), why, "use another one of the run");
}

json read_manifest(const fs::path& directory) {
  std::ifstream stream(directory / manifest_name);
  if (!stream) {
    throw InputError(fmt::format("checkpoint {}", directory.string()), "it has no readable manifest.json",
                     "name a folder like OUT/checkpoints/step-00000100");
  }
  json manifest = json::parse(stream, nullptr, false);
  if (!manifest.is_object() || !manifest.contains("format")) corrupt(directory, "its manifest is no JSON object");
  if (manifest["format"] != Manifest::format) {
    corrupt(directory,
            fmt::format("its format is {}, this tandem reads {}", manifest["format"].dump(), +Manifest::format));
  }
  return manifest;
}

void check_files(const fs::path& directory, const json& files) {
  bool state_listed = false;
  for (const json& file : files) {
    const auto name = file.at("name").get<std::string>();
    if (name.find('/') != std::string::npos || name == "..") corrupt(directory, "its manifest names a file elsewhere");
    if (file_hash(directory / name) != file.at("xxh3_128").get<std::string>()) {
      corrupt(directory, fmt::format("{} has another content than when it was saved", name));
    }
    state_listed = state_listed || name == state_name;
  }
  if (!state_listed) corrupt(directory, "its manifest lists no state");
}

std::vector<fs::path> checkpoints_below(const fs::path& root) {
  std::vector<fs::path> found;
  std::error_code error;
  for (fs::directory_iterator it(root, error), end; !error && it != end; it.increment(error)) {
    if (it->path().filename().string().starts_with("step-")) found.push_back(it->path());
  }
  std::sort(found.begin(), found.end(), std::greater<>());
  return found;
}

/// Writes the state and returns its entry in the file list.
json write_state(const fs::path& file, Manifest& manifest, std::span<float> buffer, const StateReader& read) {
  SafetensorsWriter writer(file, specs_of(manifest.parameters), {{"format", "tandem"}});
  StateDigest digest;
  for (std::size_t i = 0; i < manifest.parameters.size(); ++i) {
    const auto& parameter = manifest.parameters[i];
    const auto values = buffer.first(static_cast<std::size_t>(parameter.count()));
    digest.begin_parameter(parameter.name);
    for (int part = 0; part < state_parts; ++part) {
      if (part < parts_of(parameter)) {
        read(i, static_cast<StatePart>(part), values);
        writer.write(values.data(), values.size_bytes());
      } else {
        std::fill(values.begin(), values.end(), 0.0F);
      }
      digest.add(values.data(), parameter.count());
      digest.end_array();
    }
    digest.end_parameter();
  }
  writer.finish();
  manifest.state_digest = digest.text();
  return {{"name", state_name}, {"bytes", writer.bytes()}, {"xxh3_128", writer.hash()}};
}

/// Removes a folder of ours that was not finished, whatever happens.
class Unfinished {
 public:
  explicit Unfinished(fs::path path) : path_(std::move(path)) {}
  ~Unfinished() {
    std::error_code ignored;
    if (!path_.empty()) fs::remove_all(path_, ignored);
  }
  Unfinished(const Unfinished&) = delete;
  Unfinished& operator=(const Unfinished&) = delete;
  void keep() { path_.clear(); }

 private:
  fs::path path_;
};

}  // namespace

std::int64_t CheckpointParameter::count() const noexcept {
  std::int64_t result = 1;
  for (const std::int64_t dim : shape) result *= dim;
  return result;
}

std::string checkpoint_name(std::int64_t step) { return fmt::format("step-{:08}", step); }

fs::path write_checkpoint(const fs::path& root, Manifest& manifest, std::span<float> buffer, const StateReader& read) {
  create_directories_or_throw(root);
  const fs::path final = root / checkpoint_name(manifest.step);
  const fs::path hidden = root / fmt::format(".{}.tmp", checkpoint_name(manifest.step));
  const fs::path old = root / fmt::format(".{}.old", checkpoint_name(manifest.step));
  std::error_code ignored;
  fs::remove_all(hidden, ignored);
  create_directories_or_throw(hidden);
  Unfinished guard(hidden);
  const json state = write_state(hidden / state_name, manifest, buffer, read);
  write_file_atomically(hidden / manifest_name, to_json(manifest, json::array({state})).dump(2) + "\n");
  sync_directory(hidden);
  if (fs::exists(final, ignored)) {
    fs::remove_all(old, ignored);
    rename_or_throw(final, old);
  }
  rename_or_throw(hidden, final);
  guard.keep();
  sync_directory(root);
  fs::remove_all(old, ignored);
  return final;
}

Checkpoint::Checkpoint(const fs::path& directory) : directory_(directory) {
  const json manifest = read_manifest(directory);
  try {
    manifest_ = from_json(manifest);
    check_files(directory, manifest.at("files"));
  } catch (const json::exception&) {
    corrupt(directory, "its manifest lacks an entry or has one of the wrong type");
  }
  state_ = std::make_unique<SafetensorsReader>(directory / state_name);
  for (const TensorSpec& spec : specs_of(manifest_.parameters)) {
    const StoredTensor* tensor = state_->find(spec.name);
    if (tensor == nullptr || tensor->shape != spec.shape || tensor->dtype != spec.dtype) {
      corrupt(directory, fmt::format("tensor {} is missing or of another shape", spec.name));
    }
  }
}

void Checkpoint::read(std::size_t index, StatePart part, std::span<float> values) const {
  const auto& parameter = manifest_.parameters.at(index);
  const int p = static_cast<int>(part);
  if (p >= parts_of(parameter)) {
    std::fill(values.begin(), values.end(), 0.0F);
    return;
  }
  widen(*state_->find(prefixes[p] + parameter.name), 0, values);
}

std::size_t Checkpoint::index_of(const std::string& name) const {
  const auto& all = manifest_.parameters;
  const auto found = std::find_if(all.begin(), all.end(), [&](const auto& p) { return p.name == name; });
  if (found == all.end()) corrupt(directory_, fmt::format("it has no parameter {}", name));
  return static_cast<std::size_t>(found - all.begin());
}

std::string Checkpoint::state_digest() const {
  std::vector<float> block(static_cast<std::size_t>(state_digest_block));
  StateDigest digest;
  for (const auto& parameter : manifest_.parameters) {
    digest.begin_parameter(parameter.name);
    for (int part = 0; part < state_parts; ++part) {
      const StoredTensor* tensor = part < parts_of(parameter) ? state_->find(prefixes[part] + parameter.name) : nullptr;
      for (std::int64_t at = 0; at < parameter.count(); at += state_digest_block) {
        const auto count = std::min(state_digest_block, parameter.count() - at);
        const auto values = std::span(block).first(static_cast<std::size_t>(count));
        if (tensor != nullptr)
          widen(*tensor, at, values);
        else
          std::fill(values.begin(), values.end(), 0.0F);
        digest.add(values.data(), count);
      }
      digest.end_array();
    }
    digest.end_parameter();
  }
  return digest.text();
}

bool is_checkpoint(const fs::path& directory) {
  std::error_code ignored;
  return fs::is_regular_file(directory / manifest_name, ignored);
}

std::unique_ptr<Checkpoint> newest_checkpoint(
    const fs::path& root, const std::function<void(const fs::path&, const std::string&)>& passed_over) {
  for (const fs::path& candidate : checkpoints_below(root)) {
    try {
      return std::make_unique<Checkpoint>(candidate);
    } catch (const InputError& error) {
      passed_over(candidate, error.what());
    }
  }
  return nullptr;
}

void prune_checkpoints(const fs::path& root, int keep) noexcept {
  try {
    std::error_code ignored;
    std::vector<fs::path> leftovers;
    for (const auto& entry : fs::directory_iterator(root, ignored)) {
      if (entry.path().filename().string().starts_with(".step-")) leftovers.push_back(entry.path());
    }
    for (const auto& path : leftovers) fs::remove_all(path, ignored);
    if (keep < 1) return;
    const auto all = checkpoints_below(root);
    for (std::size_t i = static_cast<std::size_t>(keep); i < all.size(); ++i) fs::remove_all(all[i], ignored);
  } catch (const std::exception&) {
    return;  // no memory for a list: the old checkpoints stay
  }
}

}  // namespace tandem
