#include "core/base/error.hpp"

namespace tandem {
namespace {

std::string message_line(std::string_view what, std::string_view why, std::string_view advice) {
  std::string text(what);
  if (!why.empty()) text.append(": ").append(why);
  if (!advice.empty()) text.append("; ").append(advice);
  for (char& c : text) {
    if (c == '\n' || c == '\r') c = ' ';
  }
  return text;
}

}  // namespace

Error::Error(ExitCode code, std::string_view what, std::string_view why, std::string_view advice)
    : std::runtime_error(message_line(what, why, advice)), code_(code) {}

}  // namespace tandem
