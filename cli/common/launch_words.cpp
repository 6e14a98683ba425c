#include "cli/common/launch_words.hpp"

#include <algorithm>
#include <array>
#include <string_view>

namespace tandem {
namespace {

/// Flags before the command that take the next word as their value.
constexpr std::array<std::string_view, 2> with_value = {"--processes", "--log-level"};

/// Number of the first word from `begin` on that is neither a flag nor its value.
std::size_t first_plain(const std::vector<std::string>& words, std::size_t begin) {
  for (std::size_t i = begin; i < words.size(); ++i) {
    if (words[i] == "--" || !words[i].starts_with('-')) return i;
    if (std::ranges::find(with_value, words[i]) != with_value.end()) ++i;
  }
  return words.size();
}

}  // namespace

std::vector<std::string> with_command_marked(std::vector<std::string> words) {
  const std::size_t launch = first_plain(words, 0);
  if (launch >= words.size() || words[launch] != "launch") return words;
  const std::size_t command = first_plain(words, launch + 1);
  if (command < words.size() && words[command] != "--") {
    words.insert(words.begin() + static_cast<std::ptrdiff_t>(command), "--");
  }
  return words;
}

}  // namespace tandem
