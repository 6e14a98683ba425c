#pragma once
// Commands that a run shows when it ends, ready to be pasted into a shell.
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tandem {

/// A word of a command line, in quotes where a shell would read it otherwise.
std::string shell_word(std::string_view word);

/// Form in which a model is asked: by token ids, by a text, or in a chat of its template.
enum class PromptKind : std::uint8_t { ids, text, chat };

/// A run that ends, as far as its next commands depend on it.
struct EndedRun {
  std::string program;  ///< the program as it was called; a word for a shell
  std::string out;      ///< folder of the run, as typed
  PromptKind prompt = PromptKind::ids;
  std::int64_t step = 0;
  std::int64_t best_step = 0;         ///< step whose checkpoint is kept as the best; 0: none
  std::optional<double> best_loss{};  ///< its loss on the evaluation data
};

/// The command that goes on with the run.
std::string resume_command(const EndedRun& run);
/// Commands for a run that has taken all its steps: each on a line of its own, without a newline behind the last.
std::string commands_after(const EndedRun& run);

}  // namespace tandem
