#include "io/manifest.hpp"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/json_text.hpp"
#include "core/base/nesting.hpp"
#include "io/plain_name.hpp"

namespace tandem {
namespace {

using nlohmann::json;

[[noreturn]] void corrupt(const std::string& where, std::string_view why) {
  throw InputError(where, why, "use another one of the run");
}

/// Values and entries, each of its type. A missing or wrong one throws json::exception.
std::uint64_t unsigned_number(const json& value) {
  if (!value.is_number_unsigned()) throw json::type_error::create(302, "not a natural number", &value);
  return value.get<std::uint64_t>();
}

std::int64_t natural(const json& value) {
  const std::uint64_t number = unsigned_number(value);
  if (!std::in_range<std::int64_t>(number)) throw json::type_error::create(302, "too large", &value);
  return static_cast<std::int64_t>(number);
}

std::string text(const json& object, const char* key) { return object.at(key).get<std::string>(); }

const json& list(const json& object, const char* key) {
  const json& value = object.at(key);
  if (!value.is_array()) throw json::type_error::create(302, "not a list", &value);
  return value;
}

std::optional<double> optional_number(const json& object, const char* key) {
  const json& value = object.at(key);
  return value.is_null() ? std::nullopt : std::optional<double>(value.get<double>());
}

json or_null(const std::optional<double>& value) { return value ? json(*value) : json(nullptr); }

/// A hash of a parameter whose values are elsewhere, as only those of a frozen one are.
std::string hash_of(const json& j, const CheckpointParameter& parameter, const std::string& where) {
  const auto text = j.get<std::string>();
  constexpr std::size_t digits = 32;
  if (parameter.trainable || text.size() != digits || text.find_first_not_of("0123456789abcdef") != text.npos) {
    corrupt(where, fmt::format("parameter {} has an impossible hash", parameter.name));
  }
  return text;
}

CheckpointParameter parameter_of(const json& j, const std::string& where) {
  CheckpointParameter parameter{.name = text(j, "name"), .shape = {}, .trainable = j.at("trainable").get<bool>()};
  if (j.contains("missed_updates")) parameter.missed_updates = natural(j.at("missed_updates"));
  if (j.contains("elsewhere")) parameter.elsewhere = hash_of(j.at("elsewhere"), parameter, where);
  if (j.contains("original")) parameter.original = hash_of(j.at("original"), parameter, where);
  std::int64_t count = 1;
  for (const json& dim : list(j, "shape")) {
    parameter.shape.push_back(natural(dim));
    if (__builtin_mul_overflow(count, parameter.shape.back(), &count)) {
      corrupt(where, fmt::format("parameter {} has an impossible shape", parameter.name));
    }
  }
  return parameter;
}

json part(const char* name, const std::string& text) {
  json value = parse_json<json>(text);
  if (value.is_discarded()) throw MisuseError(fmt::format("the manifest's {} is no JSON: {}", name, text));
  return value;
}

CheckpointFile file_of(const json& j, const std::string& where) {
  CheckpointFile file{text(j, "name"), unsigned_number(j.at("bytes")), text(j, "xxh3_128")};
  if (!is_plain_name(file.name)) corrupt(where, "its manifest names a file elsewhere");
  return file;
}

CheckpointMixPart mix_part_of(const json& j) {
  return {j.at("share").get<double>(), natural(j.at("windows")), natural(j.at("epoch")), natural(j.at("position"))};
}

json sampler_of(const Manifest& m) {
  json sampler{{"windows", m.sampler_windows}, {"epoch", m.sampler_epoch}, {"position", m.sampler_position}};
  for (const CheckpointMixPart& p : m.mix) {
    sampler["mix"].push_back(
        {{"share", p.share}, {"windows", p.windows}, {"epoch", p.epoch}, {"position", p.position}});
  }
  return sampler;
}

Optimizer optimizer_named(const std::string& name, const std::string& where) {
  for (const Optimizer optimizer : {Optimizer::adamw, Optimizer::lion}) {
    if (name == name_of(optimizer)) return optimizer;
  }
  throw NewerFormat(where, fmt::format("its optimizer is {}", name), "use the newer tandem that wrote it");
}

Manifest from_json(const json& j, const std::string& where) {
  Manifest m;
  m.tandem_version = text(j, "tandem_version");
  m.model_name = text(j, "model");
  m.model_config = json_text(j.at("model_config"), 2);
  m.token_kind = text(j, "token_kind");
  m.compute_key = text(j, "compute_key");
  m.schedule = text(j, "schedule");
  m.plan = j.at("plan").is_null() ? "" : json_text(j.at("plan"));
  m.state_digest = text(j, "state_digest");
  m.step = natural(j.at("step"));
  m.adam_step = natural(j.at("adam_step"));
  m.skipped_steps = natural(j.at("skipped_steps"));
  m.tokens = natural(j.at("tokens"));
  m.first_loss = optional_number(j, "first_loss");
  m.last_loss = optional_number(j, "last_loss");
  if (j.contains("best_step")) {
    m.best_eval_loss = optional_number(j, "best_eval_loss");
    m.best_step = natural(j.at("best_step"));
  }
  if (j.contains("evaluations")) {
    const json& evaluations = j.at("evaluations");
    m.lowest_eval_loss = optional_number(evaluations, "lowest_loss");
    m.evaluations_without_gain = natural(evaluations.at("without_gain"));
    m.counted_evaluation = natural(evaluations.at("last_step"));
  }
  m.seed = unsigned_number(j.at("seed"));
  m.sampler_windows = natural(j.at("sampler").at("windows"));
  m.sampler_epoch = natural(j.at("sampler").at("epoch"));
  m.sampler_position = natural(j.at("sampler").at("position"));
  if (j.at("sampler").contains("mix")) {
    for (const json& part : list(j.at("sampler"), "mix")) m.mix.push_back(mix_part_of(part));
  }
  if (j.contains("data_digest")) m.data_digest = text(j, "data_digest");
  if (j.contains("optimizer")) m.optimizer = optimizer_named(text(j, "optimizer"), where);
  if (j.contains("adapter")) m.adapter = json_text(j.at("adapter"), 2);
  if (j.contains("base")) m.base = text(j, "base");
  if (!m.adapter.empty() || j.contains("base")) m.base_format = text(j, "base_format");
  for (const json& p : list(j, "parameters")) {
    m.parameters.push_back(parameter_of(p, where));
    if (m.base_format.empty() && !m.parameters.back().elsewhere.empty()) corrupt(where, "its manifest names no base");
  }
  for (const json& f : list(j, "files")) m.files.push_back(file_of(f, where));
  return m;
}

}  // namespace

std::int64_t CheckpointParameter::count() const noexcept {
  std::int64_t result = 1;
  for (const std::int64_t dim : shape) result *= dim;
  return result;
}

Manifest parse_manifest(std::string_view content, const std::string& where) {
  if (nests_deeper(content)) corrupt(where, "its manifest is nested too deep");
  const json j = parse_json<json>(content);
  if (!j.is_object() || !j.contains("format")) corrupt(where, "its manifest is no JSON object with a format");
  const json& format = j["format"];
  if (format != Manifest::format && format != Manifest::format_over_base) {
    const std::string why = fmt::format("its format is {}, this tandem reads {} and {}",
                                        format.is_number() ? json_text(format) : "no number", +Manifest::format,
                                        +Manifest::format_over_base);
    if (format.is_number() && format.get<double>() > Manifest::format_over_base) {
      throw NewerFormat(where, why, "use the newer tandem that wrote it");
    }
    throw InputError(where, why, "use another one of the run");
  }
  try {
    return from_json(j, where);
  } catch (const json::exception&) {
    corrupt(where, "its manifest lacks an entry or has one of the wrong type");
  }
}

std::string manifest_text(const Manifest& m) {
  json parameters = json::array();
  for (const auto& p : m.parameters) {
    parameters.push_back({{"name", p.name}, {"shape", p.shape}, {"trainable", p.trainable}});
    if (!p.elsewhere.empty()) parameters.back()["elsewhere"] = p.elsewhere;
    if (!p.original.empty()) parameters.back()["original"] = p.original;
    if (p.missed_updates > 0) parameters.back()["missed_updates"] = p.missed_updates;
  }
  json files = json::array();
  for (const auto& f : m.files) files.push_back({{"name", f.name}, {"bytes", f.bytes}, {"xxh3_128", f.hash}});
  // Programs that know no adapters would take a checkpoint without frozen parameters for a damaged one.
  json j{{"format", m.base_format.empty() ? Manifest::format : Manifest::format_over_base},
         {"tandem_version", m.tandem_version},
         {"model", m.model_name},
         {"model_config", part("model_config", m.model_config)},
         {"token_kind", m.token_kind},
         {"compute_key", m.compute_key},
         {"schedule", m.schedule},
         {"plan", m.plan.empty() ? json(nullptr) : part("plan", m.plan)},
         {"state_digest", m.state_digest},
         {"step", m.step},
         {"adam_step", m.adam_step},
         {"skipped_steps", m.skipped_steps},
         {"tokens", m.tokens},
         {"first_loss", or_null(m.first_loss)},
         {"last_loss", or_null(m.last_loss)},
         {"best_eval_loss", or_null(m.best_eval_loss)},
         {"best_step", m.best_step},
         {"seed", m.seed},
         {"sampler", sampler_of(m)},
         {"parameters", parameters},
         {"files", files}};
  if (m.counted_evaluation > 0) {
    j["evaluations"] = {{"last_step", m.counted_evaluation},
                        {"lowest_loss", or_null(m.lowest_eval_loss)},
                        {"without_gain", m.evaluations_without_gain}};
  }
  if (!m.data_digest.empty()) j["data_digest"] = m.data_digest;
  if (!m.adapter.empty()) j["adapter"] = part("adapter", m.adapter);
  if (!m.base_format.empty()) {
    j["base_format"] = m.base_format;
    if (m.adapter.empty()) j["base"] = m.base;
  }
  if (m.optimizer != Optimizer::adamw) j["optimizer"] = name_of(m.optimizer);
  return json_document(j);
}

}  // namespace tandem
