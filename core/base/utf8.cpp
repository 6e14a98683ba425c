#include "core/base/utf8.hpp"

#include <array>

namespace tandem {

std::optional<Utf8Character> utf8_at(std::string_view text) noexcept {
  const auto byte = [&](std::size_t i) { return static_cast<std::uint32_t>(static_cast<unsigned char>(text[i])); };
  constexpr std::array<std::uint32_t, 5> least{0, 0, 0x80, 0x800, 0x10000};
  const std::uint32_t lead = byte(0);
  if (lead < 0x80) return Utf8Character{lead, 1};
  const std::size_t bytes = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc0 || lead >= 0xf8 || bytes > text.size()) return std::nullopt;
  std::uint32_t code = lead & (0x7fU >> bytes);
  for (std::size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0U) != 0x80) return std::nullopt;
    code = (code << 6) | (byte(i) & 0x3fU);
  }
  const bool surrogate = code >= 0xd800 && code < 0xe000;
  if (code < least[bytes] || code > 0x10ffff || surrogate) return std::nullopt;
  return Utf8Character{code, bytes};
}

bool is_utf8(std::string_view text) noexcept {
  while (!text.empty()) {
    const auto character = utf8_at(text);
    if (!character) return false;
    text.remove_prefix(character->bytes);
  }
  return true;
}

}  // namespace tandem
