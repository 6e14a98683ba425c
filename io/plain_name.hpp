#pragma once
// Names of files that come out of a file.
#include <string_view>

namespace tandem {

/// Whether `name` can only be an entry of the folder that it is looked up in.
constexpr bool is_plain_name(std::string_view name) noexcept {
  return !name.empty() && name != "." && name != ".." && name.find_first_of(std::string_view("/\0", 2)) == name.npos;
}

}  // namespace tandem
