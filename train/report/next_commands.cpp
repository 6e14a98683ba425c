#include "train/report/next_commands.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace tandem {
namespace {

bool is_plain(char c) {
  const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
  return letter || std::string_view("_./:=,@%+-").find(c) != std::string_view::npos;
}

std::string_view flag_of(PromptKind prompt) {
  switch (prompt) {
    case PromptKind::chat:
      return "--chat";
    case PromptKind::text:
      return "--prompt 'The '";
    case PromptKind::ids:
      break;
  }
  return "--prompt '1 2 3'";
}

/// "DIR/exported" for any spelling of DIR.
std::string export_folder(const std::string& out) { return out + (out.ends_with('/') ? "exported" : "/exported"); }

}  // namespace

std::string shell_word(std::string_view word) {
  if (!word.empty() && std::ranges::all_of(word, is_plain)) return std::string(word);
  std::string quoted = "'";
  for (const char c : word) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

std::string resume_command(const EndedRun& run) {
  return fmt::format("{} train --resume {}", run.program, shell_word(run.out));
}

std::string commands_after(const EndedRun& run) {
  const std::string out = shell_word(run.out);
  const std::string to = shell_word(export_folder(run.out));
  std::string text = fmt::format("next:\n  {} sample --model {} {}\n  {} export {} --to {}", run.program, out,
                                 flag_of(run.prompt), run.program, out, to);
  if (run.best_step == 0 || run.best_step == run.step) return text;
  text += fmt::format("\nthe best checkpoint is that of step {}", run.best_step);
  if (run.best_loss) text += fmt::format(", eval loss {:.4f}", *run.best_loss);
  return text + fmt::format(":\n  {} export {} --best --to {}", run.program, out, to);
}

}  // namespace tandem
