#include "core/base/toml_text.hpp"

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>

#include "core/base/error.hpp"
#include "core/base/utf8.hpp"

namespace tandem {
namespace {

constexpr std::size_t largest = std::size_t{1} << 20;  // bytes; tandem writes a few thousand

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
    const auto character = utf8_at(rest_);
    if (!character) refuse("bytes that are no UTF-8");
    if (instead.empty() && !may_escape) refuse("a character beyond ASCII outside of a string");
    out_ += may_escape ? fmt::format("\\U{:08x}", character->code) : std::string(instead);
    rest_.remove_prefix(character->bytes);
  }

  /// Skips a string, from its opening quotes past the closing ones, or past the end of a line that lacks them.
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
