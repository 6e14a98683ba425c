#include "train/sampling/end_tokens.hpp"

#include <fmt/format.h>
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

/// End tokens of one model, as they are found.
class EndTokens {
 public:
  explicit EndTokens(std::int64_t vocabulary) : vocabulary_(vocabulary) {}

  /// An id, or a list of them; null is none. `place`: where it stands, for the warning of what is no id.
  void add(const Json& value, const std::string& place) {
    for (const Json& id : value.is_array() ? value : Json::array({value})) {
      if (!id.is_null()) add_one(id, place);
    }
  }
  bool empty() const noexcept { return ids_.empty(); }
  std::vector<std::int32_t> ids() const { return {ids_.begin(), ids_.end()}; }

 private:
  void add_one(const Json& id, const std::string& place) {
    const bool known = id.is_number_unsigned() && id.get<std::uint64_t>() < static_cast<std::uint64_t>(vocabulary_);
    if (known) {
      ids_.insert(id.get<std::int32_t>());
    } else {
      spdlog::warn("{} has {}, which is no token id below the vocabulary of {}: it ends no text", place,
                   id.dump(-1, ' ', true, Json::error_handler_t::replace).substr(0, 60), vocabulary_);
    }
  }

  std::int64_t vocabulary_;
  std::set<std::int32_t> ids_;
};

/// Path of a file beside the weights, with a field of it; for messages.
std::string place_of(const ModelSource& source, std::string_view name, std::string_view field) {
  const auto found = std::ranges::find(source.beside, name, &FileBeside::name);
  return fmt::format("{} of {}", field, found == source.beside.end() ? std::string(name) : found->from.string());
}

/// Id of a token of tokenizer.json that has this text among those that were added to its vocabulary.
void add_token(const ModelSource& source, const std::string& text, EndTokens& ids) {
  const Json tokenizer = object_in(source, "tokenizer.json");
  for (const Json& token : tokenizer.value("added_tokens", Json::array())) {
    if (token.is_object() && token.contains("content") && token["content"] == text && token.contains("id")) {
      ids.add(token["id"], place_of(source, "tokenizer.json", fmt::format("'{}'", text)));
    }
  }
}

}  // namespace

std::vector<std::int32_t> end_tokens(const ModelSource& source) {
  EndTokens ids(source.config.vocabulary);
  ids.add(object_in(source, "generation_config.json").value("eos_token_id", Json()),
          place_of(source, "generation_config.json", "eos_token_id"));
  const bool named = !ids.empty();
  for (const auto& [key, value] : source.config.passed_on) {
    if (named || key != "eos_token_id") continue;
    ids.add(Json::parse(value, nullptr, /*allow_exceptions=*/false), "eos_token_id of the model's config.json");
  }
  Json text = object_in(source, "tokenizer_config.json").value("eos_token", Json());
  if (text.is_object()) text = text.value("content", Json());
  if (text.is_string()) add_token(source, text.get<std::string>(), ids);
  return ids.ids();
}

}  // namespace tandem
