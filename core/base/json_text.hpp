#pragma once
// JSON between text and values, for those who would else compile nlohmann's reader and writer each for itself.
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace tandem {

constexpr int one_line = -1;  ///< an `indent`

/// The value of `text`, which is_discarded() where that is no JSON or nests deeper than `deepest_json`. Json is
/// nlohmann::json or ordered_json, which keeps the order of keys, and is named where it is called: the one converts to
/// the other without a word, in an order that is neither's.
template <class Json>
Json parse_json(std::string_view text);
extern template nlohmann::json parse_json<nlohmann::json>(std::string_view text);
extern template nlohmann::ordered_json parse_json<nlohmann::ordered_json>(std::string_view text);

/// `value` as text, levels `indent` spaces apart, no line at its end. Strings are data from elsewhere: their bytes that
/// are no UTF-8 are replaced (by U+FFFD), never thrown over.
std::string json_text(const nlohmann::json& value, int indent = one_line);
std::string json_text(const nlohmann::ordered_json& value, int indent = one_line);

/// JSON text as in files and on standard output: levels indented by two spaces, with a line break at the end.
std::string json_document(const nlohmann::json& value);
std::string json_document(const nlohmann::ordered_json& value);

}  // namespace tandem
