#pragma once
// UTF-8 as TOML and JSON have it: no overlong forms, no surrogates.
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace tandem {

struct Utf8Character {
  std::uint32_t code = 0;
  std::size_t bytes = 0;
};

/// The character that `text`, which is not empty, begins with; nothing where it is none.
std::optional<Utf8Character> utf8_at(std::string_view text) noexcept;
bool is_utf8(std::string_view text) noexcept;

}  // namespace tandem
