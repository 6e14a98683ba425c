#pragma once
// Patterns that names of parameters are searched for.
#include <regex>
#include <string>
#include <string_view>

namespace tandem {

/// A regular expression that is searched for along all paths at once, so that the time is bounded by the lengths of
/// name and pattern, counts written out. Throws UsageError on one that is none, that is long, or that refers back to a
/// group, which only one path at a time could.
std::regex name_pattern(std::string_view text);

}  // namespace tandem
