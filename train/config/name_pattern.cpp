#include "train/config/name_pattern.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "core/base/error.hpp"

namespace tandem {

std::regex name_pattern(std::string_view text) {
  constexpr std::size_t longest = 1000;  // the standard library's parser calls itself for each parenthesis
  if (text.size() > longest) {
    throw UsageError(fmt::format("a pattern of {} bytes", text.size()), "too long", fmt::format("{} at most", longest));
  }
  constexpr std::ptrdiff_t most_digits = 4;  // nor does it look whether a count overflows
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  for (auto at = text.begin(); at != text.end();) {
    const auto end = std::find_if_not(at, text.end(), is_digit);
    if (end - at > most_digits) throw UsageError(fmt::format("'{}'", text), "it holds a number that no name has");
    at = std::find_if(end, text.end(), is_digit);
  }
  try {
    // The library's own way tries out every path, and of (.*)*! there are more than anybody can wait for.
    return std::regex(std::string(text), std::regex::ECMAScript | std::regex_constants::__polynomial);
  } catch (const std::regex_error& error) {
    const bool refers_back = error.code() == std::regex_constants::error_complexity;
    throw UsageError(fmt::format("'{}'", text), refers_back ? "it refers back to a group" : "not a regular expression",
                     "for example 'wte|wpe'");
  }
}

}  // namespace tandem
