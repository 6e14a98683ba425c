#pragma once
// The terminal that standard output may be.
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace tandem {

/// Emphasis of a text where the terminal has colours.
enum class Style : unsigned char { plain, bold, good, warning, faint };

class Terminal {
 public:
  /// Looks at standard output and the environment: a terminal whose TERM is "dumb" counts as none, and NO_COLOR, where
  /// it is not empty, leaves colours out.
  static Terminal of_standard_output();
  /// Terminal that neither moves nor colours, like a file.
  Terminal() = default;

  /// Whether a line can be drawn anew.
  bool redraws() const noexcept { return redraws_; }
  /// Characters in a line; empty where it is unknown. Asked each time, as windows change.
  std::optional<std::size_t> width() const;
  std::string painted(std::string_view text, Style style) const;

 private:
  bool redraws_ = false;
  bool colours_ = false;
};

}  // namespace tandem
