#include "train/report/terminal.hpp"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>

namespace tandem {
namespace {

std::string_view variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string_view() : std::string_view(value);
}

std::string_view code_of(Style style) {
  switch (style) {
    case Style::bold:
      return "1";
    case Style::good:
      return "32";
    case Style::warning:
      return "33";
    case Style::faint:
      return "2";
    case Style::plain:
      break;
  }
  return {};
}

}  // namespace

Terminal Terminal::of_standard_output() {
  Terminal terminal;
  terminal.redraws_ = ::isatty(STDOUT_FILENO) == 1 && variable("TERM") != "dumb";
  terminal.colours_ = terminal.redraws_ && variable("NO_COLOR").empty();
  return terminal;
}

std::optional<std::size_t> Terminal::width() const {
  winsize size{};
  if (!redraws_ || ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return std::nullopt;
  return size.ws_col;
}

std::string Terminal::painted(std::string_view text, Style style) const {
  const std::string_view code = code_of(style);
  return colours_ && !code.empty() ? fmt::format("\x1b[{}m{}\x1b[0m", code, text) : std::string(text);
}

}  // namespace tandem
