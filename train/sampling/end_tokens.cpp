#include "train/sampling/end_tokens.hpp"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>

namespace tandem {
namespace {

using Json = nlohmann::json;
namespace fs = std::filesystem;

/// The object in a file beside the weights; empty where there is none.
Json object_in(const ModelSource& source, std::string_view name) {
  const auto found = std::ranges::find(source.beside, name, &FileBeside::name);
  if (found == source.beside.end()) return Json::object();
  std::ifstream file(found->from, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  Json object = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (object.is_object()) return object;
  spdlog::warn("{} is no object of JSON: no end token is taken from it", found->from.string());
  return Json::object();
}

void add_ids(const Json& value, std::set<std::int64_t>& ids) {
  for (const Json& id : value.is_array() ? value : Json::array({value})) {
    if (id.is_number_integer()) ids.insert(id.get<std::int64_t>());
  }
}

/// Id of a token of tokenizer.json that has this text among those that were added to its vocabulary.
void add_token(const ModelSource& source, const std::string& text, std::set<std::int64_t>& ids) {
  const Json tokenizer = object_in(source, "tokenizer.json");
  for (const Json& token : tokenizer.value("added_tokens", Json::array())) {
    if (token.is_object() && token.contains("content") && token["content"] == text && token.contains("id")) {
      add_ids(token["id"], ids);
    }
  }
}

}  // namespace

std::vector<std::int32_t> end_tokens(const ModelSource& source) {
  std::set<std::int64_t> ids;
  add_ids(object_in(source, "generation_config.json").value("eos_token_id", Json()), ids);
  const bool named = !ids.empty();
  for (const auto& [key, value] : source.config.passed_on) {
    if (!named && key == "eos_token_id") add_ids(Json::parse(value, nullptr, /*allow_exceptions=*/false), ids);
  }
  Json text = object_in(source, "tokenizer_config.json").value("eos_token", Json());
  if (text.is_object()) text = text.value("content", Json());
  if (text.is_string()) add_token(source, text.get<std::string>(), ids);
  std::vector<std::int32_t> below;
  for (const std::int64_t id : ids) {
    if (id >= 0 && id < source.config.vocabulary) below.push_back(static_cast<std::int32_t>(id));
  }
  return below;
}

}  // namespace tandem
