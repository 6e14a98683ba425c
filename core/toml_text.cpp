#include "core/toml_text.hpp"

#include <fmt/format.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "core/error.hpp"

namespace tandem {
namespace {

constexpr std::size_t largest = std::size_t{1} << 20;  // what tandem writes has a few thousand bytes

struct Character {
  std::uint32_t code = 0;
  std::size_t bytes = 0;
};

/// The UTF-8 character that `text` begins with, which is beyond ASCII; nothing where it is none.
std::optional<Character> character_at(std::string_view text) noexcept {
  const auto byte = [&](std::size_t i) { return static_cast<std::uint32_t>(static_cast<unsigned char>(text[i])); };
  constexpr std::array<std::uint32_t, 5> least{0, 0, 0x80, 0x800, 0x10000};
  const std::uint32_t lead = byte(0);
  const std::size_t bytes = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc0 || lead >= 0xf8 || bytes > text.size()) return std::nullopt;
  std::uint32_t code = lead & (0x7fU >> bytes);
  for (std::size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0U) != 0x80) return std::nullopt;
    code = (code << 6) | (byte(i) & 0x3fU);
  }
  const bool surrogate = code >= 0xd800 && code < 0xe000;
  if (code < least[bytes] || code > 0x10ffff || surrogate) return std::nullopt;
  return Character{code, bytes};
}

/// Knows comments and strings, and nothing else of TOML.
class Escaper {
 public:
  Escaper(std::string_view toml, std::string_view what) : rest_(toml), what_(what) {}

  std::string text() {
    if (rest_.starts_with("\xef\xbb\xbf")) rest_.remove_prefix(3);  // a byte order mark
    while (!rest_.empty()) {
      const char c = rest_.front();
      if (c == '#') {
        while (!rest_.empty() && rest_.front() != '\n') take("?");
      } else if (c == '"' || c == '\'') {
        const bool lines = rest_.size() >= 3 && rest_[1] == c && rest_[2] == c;
        take_string(rest_.substr(0, lines ? 3 : 1));
      } else {
        take();
      }
    }
    return std::move(out_);
  }

 private:
  [[noreturn]] void refuse(std::string_view why) const {
    throw UsageError(what_, fmt::format("line {}: {}", line_, why), "quote it \"like this\"");
  }

  /// Moves one character on; one beyond ASCII becomes `instead`, or an escape where it `may_escape`.
  void take(std::string_view instead = {}, bool may_escape = false) {
    const char c = rest_.front();
    if (static_cast<unsigned char>(c) < 0x80) {
      line_ += c == '\n' ? 1 : 0;
      out_ += c;
      rest_.remove_prefix(1);
      return;
    }
    const auto character = character_at(rest_);
    if (!character) refuse("bytes that are no UTF-8");
    if (instead.empty() && !may_escape) refuse("a character beyond ASCII outside of a string");
    out_ += may_escape ? fmt::format("\\U{:08x}", character->code) : std::string(instead);
    rest_.remove_prefix(character->bytes);
  }

  /// From opening quotes past closing ones, or past the line of a string that ends in none.
  void take_string(std::string_view quotes) {
    const bool lines = quotes.size() == 3;
    const bool escapes = quotes.front() == '"';
    const auto take_quotes = [&] {
      for (std::size_t i = 0; i < quotes.size(); ++i) take();
    };
    take_quotes();
    while (!rest_.empty() && (lines || rest_.front() != '\n')) {
      if (rest_.starts_with(quotes)) {
        take_quotes();
        // Up to two quotes more belong to the text.
        for (int i = 0; lines && i < 2 && rest_.starts_with(quotes.front()); ++i) take();
        return;
      }
      const bool escape = escapes && rest_.front() == '\\';
      take({}, escapes);
      if (escape && !rest_.empty()) take();
    }
  }

  std::string_view rest_;
  std::string_view what_;
  std::string out_;
  int line_ = 1;
};

}  // namespace

std::string toml_in_ascii(std::string_view toml, std::string_view what) {
  if (toml.size() > largest) throw UsageError(what, fmt::format("{} bytes are too many", toml.size()));
  return Escaper(toml, what).text();
}

}  // namespace tandem
