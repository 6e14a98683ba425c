// tandem sample: continues prompts, or keeps a conversation.
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/common/commands.hpp"
#include "cli/common/flags.hpp"
#include "cli/common/trained_model.hpp"
#include "cli/sampling/chat.hpp"
#include "cli/sampling/prompts.hpp"
#include "core/base/json_text.hpp"
#include "train/hf/trained_layout.hpp"
#include "train/runtime/stop_signal.hpp"
#include "train/sampling/end_tokens.hpp"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

/// Positions of a conversation's cache, unless --context says otherwise.
constexpr std::int64_t usual_context = 4096;

struct SampleFlags {
  ConfigFlags config;
  DrawOptions draw;
  std::optional<std::int64_t> max_tokens, context;
  std::int64_t batch = 16;
  std::vector<std::string> prompts, prompt_ids, stops;
  std::string source, file, system;
  bool json = false, chat = false;

  std::int64_t tokens_wanted() const { return max_tokens.value_or(chat ? 1000 : 100); }
};

void check_ranges(const SampleFlags& flags) {
  const auto need = [](bool holds, std::string_view flag, auto value, std::string_view range) {
    if (!holds) throw UsageError(fmt::format("--{} {}", flag, value), "out of range", fmt::format("use {}", range));
  };
  const DrawOptions& draw = flags.draw;
  need(flags.tokens_wanted() >= 1, "max-tokens", flags.tokens_wanted(), "at least 1");
  need(std::isfinite(draw.temperature) && draw.temperature >= 0.0, "temperature", draw.temperature,
       "a number of at least 0");
  need(draw.top_k >= 0, "top-k", draw.top_k, "at least 0");
  need(draw.top_p > 0.0 && draw.top_p <= 1.0, "top-p", draw.top_p, "a number above 0, and at most 1");
  need(std::isfinite(draw.repetition_penalty) && draw.repetition_penalty > 0.0, "repetition-penalty",
       draw.repetition_penalty, "a number above 0");
  need(flags.batch >= 1 && flags.batch <= 4096, "batch", flags.batch, "1 to 4096");
  need(flags.context.value_or(1) >= 1, "context", flags.context.value_or(1), "at least 1");
  need(std::ranges::none_of(flags.stops, &std::string::empty), "stop", "''", "a text that is not empty");
}

void check_flags(const SampleFlags& flags) {
  check_ranges(flags);
  const bool texts = !flags.prompts.empty() || !flags.file.empty(), ids = !flags.prompt_ids.empty();
  const auto refuse_beside = [](bool both, std::string_view flag, std::string_view other, std::string_view advice) {
    if (both) throw UsageError(fmt::format("{} beside {}", flag, other), "one excludes the other", advice);
  };
  refuse_beside(texts && ids, "--prompt-ids", "--prompt or --prompts", "give all prompts as text, or all as ids");
  refuse_beside(flags.chat && (texts || ids), "--chat", "prompts", "type them, or pipe them in, a line each");
  refuse_beside(flags.chat && flags.json, "--chat", "--json", "leave one of them out");
  if (!flags.chat && !flags.system.empty()) throw UsageError("--system", "it begins a conversation", "add --chat");
  if (!flags.chat && flags.context) throw UsageError("--context", "it is a conversation's", "add --chat");
  if (!flags.chat && !texts && !ids) {
    throw UsageError("--prompt", "missing", "give a text, for example --prompt 'The ', or --chat");
  }
}

/// Text of tokens behind a prompt, as it may be shown: up to a stop.
class Answer {
 public:
  Answer(Prompts& prompts, std::size_t index, const std::vector<std::string>& stops)
      : stream_(prompts.codec->stream(prompts.tokens[index])), filter_(stops_of(prompts, stops), !prompts.text) {}

  /// Text that may be shown now.
  std::string next(std::int32_t token) { return kept(filter_.pass(stream_->next(token))); }
  /// Text that is left at the end.
  std::string rest() {
    std::string text = filter_.pass(stream_->end());
    return kept(text + filter_.rest());
  }
  bool stopped() const { return filter_.stopped(); }
  const std::string& text() const { return text_; }

 private:
  /// Stops as the stream would write them: of ids, each with a blank before it.
  static std::vector<std::string> stops_of(Prompts& prompts, const std::vector<std::string>& stops) {
    if (prompts.text) return stops;
    std::vector<std::string> written;
    for (const std::string& stop : stops) {
      std::string& text = written.emplace_back();
      const std::vector<std::int32_t> ids = value_of("--stop", [&] { return prompts.codec->tokens_of(stop); });
      if (ids.empty()) throw UsageError("--stop", "no token ids", "give ids such as --stop '13 198'");
      for (const std::int32_t id : ids) text += fmt::format(" {}", id);
    }
    return written;
  }
  std::string kept(std::string text) {
    text_ += text;
    return text;
  }

  std::unique_ptr<TextStream> stream_;
  StopFilter filter_;
  std::string text_;
};

/// A prompt as it stands before its continuation.
std::string shown_prompt(const Prompts& prompts, std::size_t index, bool bytes) {
  if (!prompts.text) return fmt::format("{}", fmt::join(prompts.tokens[index], " "));
  return bytes ? text_of_bytes(prompts.tokens[index]) : printable(prompts.given[index].text);
}

/// Continues prompts and tells what came, as text or for --json.
class Sampling {
 public:
  Sampling(Generator& generator, Prompts& prompts, const SampleFlags& flags, const ModelSource& source)
      : generator_(generator), prompts_(prompts), flags_(flags), source_(source) {
    options_ = {flags.draw, flags.tokens_wanted(), end_tokens(source)};
  }
  void run() {
    const auto rows = static_cast<std::size_t>(flags_.batch);
    for (std::size_t begin = 0; begin < prompts_.tokens.size(); begin += rows) {
      run_some(begin, std::min(rows, prompts_.tokens.size() - begin));
    }
    if (!flags_.json) return;
    print_output(json_document(samples_.size() == 1 ? samples_.front() : Json{{"samples", samples_}}));
  }

 private:
  /// A single prompt's text comes as it is made, that of several when all are done.
  void run_some(std::size_t begin, std::size_t count) {
    std::vector<Answer> answers;
    for (std::size_t i = begin; i < begin + count; ++i) answers.emplace_back(prompts_, i, flags_.stops);
    const bool streams = !flags_.json && prompts_.tokens.size() == 1;
    if (streams) print_output(shown_prompt(prompts_, begin, source_.bytes));
    const auto began = std::chrono::steady_clock::now();
    const auto made = generator_.generate(std::span(prompts_.tokens).subspan(begin, count), options_,
                                          [&](std::size_t i, std::int32_t token) {
                                            const std::string text = answers[i].next(token);
                                            if (streams) print_output(printable(text));
                                            return !answers[i].stopped();
                                          });
    tell_time(made, std::chrono::steady_clock::now() - began);
    for (std::size_t i = 0; i < count; ++i) {
      const std::string rest = answers[i].rest();
      if (streams) print_output(printable(rest) + "\n");
      tell(begin + i, made[i], answers[i].text(), !streams);
    }
  }
  void tell(std::size_t index, const Continuation& made, const std::string& text, bool prints) {
    if (made.finish == Finish::positions) {
      spdlog::warn("{}stopped after {} tokens: the {} positions of {} are full", of_prompt(index), made.tokens.size(),
                   source_.config.positions, source_.config.name);
    }
    if (flags_.json) {
      Json sample{{"prompt", prompts_.given[index].text}, {"tokens", made.tokens}};
      if (prompts_.text) sample["text"] = text;
      sample["finish"] = name_of(made.finish);
      samples_.push_back(std::move(sample));
    } else if (prints) {
      print_output(separator(index) + shown_prompt(prompts_, index, source_.bytes) + printable(text) + "\n");
    }
  }
  static void tell_time(std::span<const Continuation> made, std::chrono::duration<double> took) {
    std::size_t tokens = 0;
    for (const Continuation& one : made) tokens += one.tokens.size();
    spdlog::debug("prompts and {} new tokens took {:.4f} s", tokens, took.count());
  }
  /// Line before each of several texts, which may be of several lines themselves.
  std::string separator(std::size_t index) const {
    return fmt::format("--- {} of {} ---\n", index + 1, prompts_.tokens.size());
  }
  std::string of_prompt(std::size_t index) const {
    return prompts_.tokens.size() == 1 ? "" : fmt::format("prompt {}: ", index + 1);
  }

  Generator& generator_;
  Prompts& prompts_;
  const SampleFlags& flags_;
  const ModelSource& source_;
  GenerateOptions options_;
  std::vector<Json> samples_;
};

/// A model over a cache of `rows` sequences of `positions`, with weights loaded.
class CachedModel {
 public:
  CachedModel(TrainConfig config, const ModelSource& source, std::int64_t rows, std::int64_t positions,
              std::int64_t longest_prompt)
      : setup_(set_up(config, source, rows, positions, longest_prompt)),
        model_(setup_, nullptr),
        generator_(model_, setup_.model->shape(), source.config.vocabulary) {
    load_weights(model_, source, setup_);
  }
  Generator& generator() { return generator_; }

 private:
  static RunSetup set_up(TrainConfig& config, const ModelSource& source, std::int64_t rows, std::int64_t positions,
                         std::int64_t longest_prompt) {
    config.seq_len = std::min(longest_prompt, Generator::most_at_once);
    config.micro_batch = rows;
    return set_up_run(config, source.config, {.training = false, .saves = false, .cached = positions});
  }

  RunSetup setup_;
  LoadedModel model_;
  Generator generator_;
};

int run_chat(const SampleFlags& flags, const TrainConfig& config, const ModelSource& source) {
  const std::filesystem::path folder = tokenizer_folder(source);
  if (folder.empty()) {
    throw UsageError("--chat", "the model came without a tokenizer", "put its tokenizer.json beside the weights");
  }
  TokenizerProcess tokenizer(folder, source.config.vocabulary);
  if (!tokenizer.has_template()) {
    throw UsageError("--chat", "the tokenizer brings no chat template",
                     "put a chat_template.jinja beside it, or use --prompt");
  }
  const std::int64_t most = source.config.positions;
  if (flags.context && *flags.context > most) {
    throw UsageError(fmt::format("--context {}", *flags.context), fmt::format("the model has {} positions", most),
                     "leave it out for as many as usual");
  }
  const std::int64_t positions = std::min(flags.context.value_or(usual_context), most);
  CachedModel model(config, source, 1, positions, positions);
  const ChatSettings settings{
      {flags.draw, flags.tokens_wanted(), end_tokens(source)}, flags.stops, flags.system, positions, positions < most};
  switch (chat(model.generator(), tokenizer, settings)) {
    case ChatEnd::interrupted:
      return exit_code_of(SIGINT);
    case ChatEnd::refused_lines:
      return static_cast<int>(ExitCode::usage);
    case ChatEnd::done:
      break;
  }
  return 0;
}

int sample(SampleFlags flags) {
  require_source("sample", flags.source);
  TrainConfig config = flags.config.config();
  if (flags.source.empty()) require_model(config);
  check_flags(flags);
  flags.draw.seed = config.seed;
  ModelSource source = find_named("sample", flags.source, config);
  take_adapters(config, source);
  check_weights(source, forward_layout(source.config));
  if (flags.chat) return run_chat(flags, config, source);
  Prompts prompts = read_prompts({flags.prompts, flags.prompt_ids, flags.file}, source);
  flags.batch = std::min(flags.batch, static_cast<std::int64_t>(prompts.tokens.size()));
  // The last new token does not go through the model.
  const std::int64_t more = std::min(flags.tokens_wanted() - 1, source.config.positions);
  const std::int64_t positions = std::min(source.config.positions, prompts.longest() + more);
  CachedModel model(config, source, flags.batch, positions, prompts.longest());
  Sampling(model.generator(), prompts, flags, source).run();
  return 0;
}

void add_prompt_options(CLI::App& command, SampleFlags& flags) {
  command
      .add_option("--prompt", flags.prompts,
                  "text to continue; token ids where the model came without a tokenizer. May be given several times. "
                  "Example: --prompt 'The '")
      ->type_name("TEXT")
      ->allow_extra_args(false);
  command
      .add_option(
          "--prompts", flags.file,
          "file with a prompt a line, or of JSON lines: {\"prompt\": \"text\"}; - reads standard input. Example: "
          "--prompts prompts.jsonl")
      ->type_name("FILE");
  command
      .add_option("--prompt-ids", flags.prompt_ids,
                  "token ids to continue, as ids. May be given several times. Example: --prompt-ids '15496 11'")
      ->type_name("IDS")
      ->allow_extra_args(false);
  command
      .add_option("--batch", flags.batch,
                  "prompts continued at once; the rest wait. Memory grows with it. Default: 16. Example: --batch 4")
      ->type_name("PROMPTS");
  command.add_flag("--chat", flags.chat,
                   "a conversation by the model's chat template, a line of input each. Default: off");
  command
      .add_option("--system", flags.system, "system message of --chat. Default: none. Example: --system 'Be brief.'")
      ->type_name("TEXT");
  command
      .add_option(
          "--context", flags.context,
          "positions of the conversation of --chat. Default: the model's, at most 4096. Example: --context 8192")
      ->type_name("TOKENS");
}

void add_draw_options(CLI::App& command, SampleFlags& flags) {
  command
      .add_option("--max-tokens", flags.max_tokens,
                  "new tokens at most. Default: 100; with --chat 1000, of an answer. Example: --max-tokens 40")
      ->type_name("TOKENS");
  command
      .add_option("--stop", flags.stops,
                  "text that ends the continuation, which is cut before it; of ids: token ids. May be given several "
                  "times. Default: none. Example: --stop 'User:'")
      ->type_name("TEXT")
      ->allow_extra_args(false);
  command
      .add_option("--temperature", flags.draw.temperature,
                  "0: always the likeliest. Default: 0.8. Example: --temperature 0.5")
      ->type_name("VALUE");
  command
      .add_option("--top-k", flags.draw.top_k,
                  "draw from the k likeliest; 0: from all. Default: 0. Example: --top-k 40")
      ->type_name("TOKENS");
  command
      .add_option("--top-p", flags.draw.top_p,
                  "draw from the likeliest that together have this probability; 1: from all. Default: 1. Example: "
                  "--top-p 0.9")
      ->type_name("VALUE");
  command
      .add_option("--repetition-penalty", flags.draw.repetition_penalty,
                  "divides what speaks for tokens that are there already; 1: off. Default: 1. Example: "
                  "--repetition-penalty 1.1")
      ->type_name("VALUE");
}

}  // namespace

CommandFunction add_sample_command(CLI::App& program) {
  auto* command = program.add_subcommand("sample", "continues prompts, or keeps a conversation");
  auto flags = std::make_shared<SampleFlags>();
  flags->config.add_to(*command, with_machine_fields({"seed"}));
  command->get_option("--seed")->description(
      "of the draws: the same prompt, flags and seed make the same tokens. Default: 42. Example: --seed 7");
  add_source(*command, flags->source);
  add_prompt_options(*command, *flags);
  add_draw_options(*command, *flags);
  command->add_flag("--json", flags->json, "one JSON object on standard output. Default: off");
  command->footer("Example: tandem sample --model runs/first --prompt 'The '");
  return [flags](const ProgramContext&) { return sample(*flags); };
}

}  // namespace tandem
