#include "cli/bench/bench_rows.hpp"

#include <fmt/format.h>

#include <fstream>
#include <sstream>

#include "core/base/error.hpp"
#include "core/base/json_text.hpp"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

Json json_of(const StepFigures& f) {
  return {{"step_seconds", f.step_seconds},
          {"forward_seconds", f.forward_seconds},
          {"backward_seconds", f.backward_seconds},
          {"update_seconds", f.update_seconds},
          {"exposed_update_seconds", f.exposed_update_seconds},
          {"tokens_per_second", f.tokens_per_second},
          {"bound_by", f.bound_by}};
}

StepFigures figures_of(const Json& json) {
  return {.step_seconds = json.at("step_seconds"),
          .forward_seconds = json.at("forward_seconds"),
          .backward_seconds = json.at("backward_seconds"),
          .update_seconds = json.at("update_seconds"),
          .exposed_update_seconds = json.at("exposed_update_seconds"),
          .tokens_per_second = json.at("tokens_per_second"),
          .bound_by = json.at("bound_by")};
}

Json json_of(const MeasuredFigures& f) {
  Json json = json_of(static_cast<const StepFigures&>(f));
  json["steps"] = f.steps;
  json["spread"] = f.spread;
  return json;
}

/// Throws UsageError where `found` has another value of any key of `expected`.
void compare(const Json& found, const Json& expected, const std::filesystem::path& folder) {
  for (const auto& [key, value] : expected.items()) {
    if (found.contains(key) && found.at(key) == value) continue;
    throw UsageError(
        fmt::format("--resume of {}", folder.string()),
        fmt::format("{} is {}, and was {}", key, json_text(value), json_text(found.value(key, Json(nullptr)))),
        "name another --out");
  }
}

}  // namespace

std::string text_of(const BenchSetting& setting) {
  std::string text;
  for (const auto& [flag, value] : setting) text += fmt::format("{}{} {}", text.empty() ? "" : ", ", flag, value);
  return text;
}

std::vector<BenchSetting> combinations(const std::vector<std::pair<std::string, std::vector<std::string>>>& flags) {
  std::vector<BenchSetting> settings{{}};
  for (const auto& [flag, values] : flags) {
    std::vector<BenchSetting> longer;
    for (const BenchSetting& setting : settings) {
      for (const std::string& value : values) longer.emplace_back(setting).emplace_back(flag, value);
    }
    settings = std::move(longer);
  }
  return settings;
}

std::string BenchRow::name() const {
  return setting.empty() ? policy : fmt::format("{}, {}", policy, text_of(setting));
}

Json json_of(const BenchRow& row) {
  Json json{{"policy", row.policy}, {"fits", row.fits()}};
  if (!row.setting.empty()) {
    json["setting"] = Json::object();
    for (const auto& [flag, value] : row.setting) json["setting"][flag] = value;
  }
  if (!row.fits()) {
    json["why"] = row.refusal;
    return json;
  }
  json["resolved"] = row.resolved;
  json["activations"] = row.activations;
  json["plan"] = {
      {"cpu_share", row.cpu_share}, {"gpu_streamed_share", row.streamed_share}, {"resident_share", row.resident_share}};
  json["predicted"] = json_of(row.predicted);
  json["predicted"]["ideal_step_seconds"] = row.ideal_step_seconds;
  json["measured"] = row.measured ? json_of(*row.measured) : Json(nullptr);
  json["h2d_bytes"] = row.h2d_bytes;
  json["d2h_bytes"] = row.d2h_bytes;
  json["planned_device_bytes"] = row.planned_device_bytes;
  json["planned_host_bytes"] = row.planned_host_bytes;
  json["peak_device_bytes"] = row.measured ? Json(row.peak_device_bytes) : Json(nullptr);
  json["state_digest"] = row.measured ? Json(row.state_digest) : Json(nullptr);
  return json;
}

BenchRow row_of(const Json& json) {
  BenchRow row;
  row.policy = json.at("policy");
  if (json.contains("setting")) {
    for (const auto& [flag, value] : json.at("setting").items()) row.setting.emplace_back(flag, value);
  }
  if (!json.at("fits").get<bool>()) {
    row.refusal = json.at("why");
    return row;
  }
  row.resolved = json.at("resolved");
  row.activations = json.value("activations", "");
  const Json& plan = json.at("plan");
  row.cpu_share = plan.at("cpu_share");
  row.streamed_share = plan.at("gpu_streamed_share");
  row.resident_share = plan.at("resident_share");
  row.predicted = figures_of(json.at("predicted"));
  row.ideal_step_seconds = json.at("predicted").at("ideal_step_seconds");
  row.h2d_bytes = json.at("h2d_bytes");
  row.d2h_bytes = json.at("d2h_bytes");
  row.planned_device_bytes = json.at("planned_device_bytes");
  row.planned_host_bytes = json.at("planned_host_bytes");
  if (json.at("measured").is_null()) return row;
  const Json& measured = json.at("measured");
  row.measured = {figures_of(measured), measured.at("steps"), measured.at("spread")};
  row.peak_device_bytes = json.at("peak_device_bytes");
  row.state_digest = json.at("state_digest");
  return row;
}

RowFile::RowFile(std::filesystem::path file, const Json& head) : file_(std::move(file)), head_(head) { write(head); }

RowFile RowFile::resume(const std::filesystem::path& file, const Json& head) {
  std::ifstream in(file, std::ios::binary);
  std::stringstream text;
  if (!in || !(text << in.rdbuf()))
    throw InputError(file.string(), "it cannot be read", "name a folder that bench wrote");
  RowFile rows(file);
  std::uintmax_t whole = 0;
  try {
    for (std::string line; std::getline(text, line) && !text.eof(); whole += line.size() + 1) {
      const Json json = parse_json<Json>(line);
      if (json.is_discarded()) throw InputError(file.string(), "it has a line that is no JSON", "name another --out");
      if (whole == 0) {
        compare(json, head, file.parent_path());
        rows.head_ = json;
      } else {
        rows.rows_.push_back(row_of(json));
      }
    }
  } catch (const nlohmann::json::exception& error) {
    throw InputError(file.string(), error.what(), "name another --out");
  }
  if (whole == 0) throw InputError(file.string(), "it has no whole line", "name another --out");
  std::error_code error;
  std::filesystem::resize_file(file, whole, error);
  if (error) throw WriteError(file.string(), error.message());
  return rows;
}

void RowFile::append(const BenchRow& row) {
  write(json_of(row));
  rows_.push_back(row);
}

void RowFile::write(const Json& line) {
  std::ofstream out(file_, std::ios::binary | std::ios::app);
  out << json_text(line) << '\n';
  if (!out.flush()) throw WriteError(file_.string(), "it cannot be written");
}

}  // namespace tandem
