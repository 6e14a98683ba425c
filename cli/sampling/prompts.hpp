#pragma once
// Prompts of `tandem sample`: as they were given, and as tokens.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "train/hf/model_source.hpp"
#include "train/sampling/text_codec.hpp"

namespace tandem {

/// Prompts as flags name them.
struct PromptFlags {
  const std::vector<std::string>& texts;  ///< --prompt
  const std::vector<std::string>& ids;    ///< --prompt-ids; excludes the others
  const std::string& file;                ///< --prompts, "-" for standard input; empty: none
};

struct GivenPrompt {
  std::string text;   ///< token ids where the model takes those
  std::string place;  ///< its origin: a flag, or a line of a file; for errors
  bool typed = true;  ///< in a flag
};

/// Prompts with the codec that reads them, and writes what follows.
struct Prompts {
  std::unique_ptr<TextCodec> codec;
  bool text = true;  ///< else token ids
  std::vector<GivenPrompt> given;
  std::vector<std::vector<std::int32_t>> tokens;

  /// Tokens of the longest.
  std::int64_t longest() const;
};

/// Reads prompts and makes tokens of them. Blocks while standard input is read, and where a tokenizer's process starts.
/// Throws UsageError for prompts of flags, InputError for those of a file, with their line, that are empty, too long
/// for the model or beyond its vocabulary, and as TextCodec.
Prompts read_prompts(const PromptFlags& flags, const ModelSource& source);

}  // namespace tandem
