#pragma once
// A guard in front of JSON readers: a text nested a million deep parses, but walking it recursively (to print
// it, to free it) would overflow the stack.
#include <string_view>

namespace tandem {

constexpr int deepest_json = 64;  ///< levels; what tandem reads has fewer than ten

/// Whether brackets and braces outside of strings nest deeper than `most`.
constexpr bool nests_deeper(std::string_view json, int most = deepest_json) noexcept {
  int depth = 0;
  bool quoted = false;
  for (std::size_t i = 0; i < json.size(); ++i) {
    const char c = json[i];
    if (quoted) {
      if (c == '\\') ++i;
      quoted = c != '"';
    } else if (c == '"') {
      quoted = true;
    } else if (c == '[' || c == '{') {
      if (++depth > most) return true;
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return false;
}

}  // namespace tandem
