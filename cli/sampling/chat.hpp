#pragma once
// A conversation with a model, line by line.
#include <cstdint>
#include <string>
#include <vector>

#include "train/sampling/generator.hpp"
#include "train/sampling/tokenizer_process.hpp"

namespace tandem {

struct ChatSettings {
  GenerateOptions options;
  std::vector<std::string> stops;
  std::string system;          ///< message that the conversation begins with; empty: none
  std::int64_t positions = 0;  ///< length of the generator's cache
  bool may_grow = false;       ///< whether the model has more positions than that
};

/// How a conversation ended.
enum class ChatEnd : std::uint8_t {
  done,
  interrupted,    ///< by SIGINT between answers, where the input is no terminal
  refused_lines,  ///< a line of the input, which is no terminal, was refused or left out; who typed it has seen that
};

/// Reads lines from standard input and answers each on standard output, until the input ends or a line is /exit; /reset
/// forgets the conversation. SIGINT ends the answer under way, and between answers the conversation where the input is
/// no terminal. Blocks. Throws WriteError where nobody takes the output.
ChatEnd chat(Generator& generator, TokenizerProcess& tokenizer, const ChatSettings& settings);

}  // namespace tandem
