#include "cli/sampling/prompts.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/json_text.hpp"
#include "core/base/utf8.hpp"
#include "train/sampling/tokenizer_process.hpp"

namespace tandem {
namespace {

/// Prompt of a JSON line: a text, or an object with one as "prompt"; empty where it is neither.
std::optional<std::string> prompt_of_json(const std::string& line) {
  const auto value = parse_json<nlohmann::json>(line);
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_object() || !value.contains("prompt") || !value["prompt"].is_string()) return std::nullopt;
  return value["prompt"].get<std::string>();
}

/// Whether lines are JSON: by the name of their file, or, of standard input, where the first is an object with a
/// prompt.
bool are_json(const std::string& name, const std::string& first) {
  if (name != "-") return name.ends_with(".jsonl") || name.ends_with(".ndjson");
  return first.starts_with('{') && prompt_of_json(first).has_value();
}

/// Prompts of a file: its lines as they are, or JSON lines. Empty lines are left out.
std::vector<GivenPrompt> prompts_in(std::istream& file, const std::string& name) {
  std::vector<GivenPrompt> prompts;
  std::optional<bool> json;
  std::int64_t number = 0;
  for (std::string line; std::getline(file, line);) {
    std::string place = fmt::format("--prompts {}, line {}", name, ++number);
    if (line.ends_with('\r')) line.pop_back();
    if (line.empty()) continue;
    if (!is_utf8(line)) throw InputError(place, "it holds bytes that are no UTF-8", "save the file as UTF-8");
    if (!json) json = are_json(name, line);
    std::optional<std::string> text = *json ? prompt_of_json(line) : line;
    if (!text) throw InputError(place, "no prompt in JSON", R"(write {"prompt": "text"}, or "text")");
    prompts.push_back({std::move(*text), std::move(place), false});
  }
  if (prompts.empty()) throw InputError(fmt::format("--prompts {}", name), "it has no prompt", "write one a line");
  return prompts;
}

std::vector<GivenPrompt> prompts_of_file(const std::string& name) {
  if (name == "-") return prompts_in(std::cin, name);
  std::ifstream file(name, std::ios::binary);
  static_cast<void>(file.peek());  // a folder can be opened, but not read
  if (!file.is_open() || file.bad()) {
    throw InputError(fmt::format("--prompts {}", name), "it cannot be read",
                     "name a file with a prompt a line, or - for standard input");
  }
  return prompts_in(file, name);
}

void choose_codec(Prompts& prompts, const PromptFlags& flags, const ModelSource& source) {
  const std::filesystem::path folder = tokenizer_folder(source);
  if (!flags.ids.empty()) {
    prompts.codec = id_codec(source.config.vocabulary, "--prompt-ids");
    prompts.text = false;
  } else if (source.bytes) {
    prompts.codec = byte_codec();
  } else if (!folder.empty()) {
    prompts.codec = std::make_unique<TokenizerProcess>(folder, source.config.vocabulary);
  } else {
    prompts.codec = id_codec(source.config.vocabulary, "--prompt");
    prompts.text = false;
  }
}

[[noreturn]] void refuse(const GivenPrompt& prompt, std::string_view why, std::string_view advice) {
  if (prompt.typed) throw UsageError(prompt.place, why, advice);
  throw InputError(prompt.place, why, advice);
}

std::vector<std::int32_t> tokens_of(const Prompts& prompts, const GivenPrompt& prompt) {
  if (prompts.text || prompt.typed) return prompts.codec->tokens_of(prompt.text);
  try {
    return prompts.codec->tokens_of(prompt.text);
  } catch (const UsageError& error) {
    refuse(prompt, error.what(), "");
  }
}

void check_tokens(const GivenPrompt& prompt, const std::vector<std::int32_t>& tokens, const ModelConfig& model) {
  if (tokens.empty()) {
    refuse(prompt, "an empty prompt", "give a text, or token ids where the model came without a tokenizer");
  }
  const auto unknown = std::ranges::find_if(tokens, [&](std::int32_t token) { return token >= model.vocabulary; });
  if (unknown != tokens.end()) {
    refuse(prompt, fmt::format("token {} of the tokenizer, the model's vocabulary has {}", *unknown, model.vocabulary),
           "the tokenizer beside the weights is another model's");
  }
  if (std::ssize(tokens) > model.positions) {
    refuse(prompt, fmt::format("{} tokens, {} has {} positions", tokens.size(), model.name, model.positions),
           "shorten it");
  }
}

}  // namespace

std::int64_t Prompts::longest() const {
  std::size_t most = 0;
  for (const auto& prompt : tokens) most = std::max(most, prompt.size());
  return static_cast<std::int64_t>(most);
}

Prompts read_prompts(const PromptFlags& flags, const ModelSource& source) {
  Prompts prompts;
  choose_codec(prompts, flags, source);
  const bool ids = !flags.ids.empty();
  for (const std::string& text : ids ? flags.ids : flags.texts)
    prompts.given.push_back({text, ids ? "--prompt-ids" : "--prompt"});
  if (!flags.file.empty()) {
    for (GivenPrompt& prompt : prompts_of_file(flags.file)) prompts.given.push_back(std::move(prompt));
  }
  for (const GivenPrompt& prompt : prompts.given) {
    prompts.tokens.push_back(tokens_of(prompts, prompt));
    check_tokens(prompt, prompts.tokens.back(), source.config);
  }
  return prompts;
}

}  // namespace tandem
