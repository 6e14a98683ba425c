#include "core/base/json_text.hpp"

#include <nlohmann/json.hpp>

#include "core/base/nesting.hpp"

namespace tandem {
namespace {

template <class Json>
std::string write(const Json& value, int indent) {
  return value.dump(indent, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
}

}  // namespace

template <class Json>
Json parse_json(std::string_view text) {
  if (nests_deeper(text)) return Json(Json::value_t::discarded);
  return Json::parse(text, nullptr, /*allow_exceptions=*/false);
}
template nlohmann::json parse_json<nlohmann::json>(std::string_view text);
template nlohmann::ordered_json parse_json<nlohmann::ordered_json>(std::string_view text);

std::string json_text(const nlohmann::json& value, int indent) { return write(value, indent); }
std::string json_text(const nlohmann::ordered_json& value, int indent) { return write(value, indent); }

std::string json_document(const nlohmann::json& value) { return write(value, 2) + "\n"; }
std::string json_document(const nlohmann::ordered_json& value) { return write(value, 2) + "\n"; }

}  // namespace tandem
