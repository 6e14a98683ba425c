#pragma once
// The tokenizer of a model: a Python process (tools/tokenizer_process.py) that encodes, decodes and writes chats, over
// a pair of pipes. A request and its answer are a line of JSON each.
#include <sys/types.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "train/hf/model_source.hpp"
#include "train/sampling/text_codec.hpp"

namespace tandem {

/// Folder with the tokenizer.json that came with the weights; empty where there is none.
std::filesystem::path tokenizer_folder(const ModelSource& source);

struct ChatMessage {
  std::string role;  ///< "system", "user", "assistant"
  std::string content;
};

/// One thread drives it. The process ends with this one, however that ends, and takes no notice of Ctrl-C.
class TokenizerProcess final : public TextCodec {
 public:
  /// Starts the process for the tokenizer of `folder`, by $TANDEM_PYTHON, else python3, and waits until it is ready.
  /// Throws UsageError in one line where there is no such Python, where it lacks the packages, or with the reason why
  /// the tokenizer cannot be used. Tokens must be below `vocabulary`. Here and in every other call: DeviceError where
  /// it does not answer for $TANDEM_TOKENIZER_SECONDS, else two minutes; it is ended then.
  TokenizerProcess(const std::filesystem::path& folder, std::int64_t vocabulary);
  ~TokenizerProcess() override;
  TokenizerProcess(const TokenizerProcess&) = delete;
  TokenizerProcess& operator=(const TokenizerProcess&) = delete;

  /// Tokens with the special ones that the tokenizer writes before a text. Throws UsageError as the process refuses.
  std::vector<std::int32_t> tokens_of(const std::string& text) override;
  /// Must not outlive this. Special tokens have no text.
  std::unique_ptr<TextStream> stream(std::span<const std::int32_t> before) override;
  /// Tokens of a chat as the model's template writes it, up to where the assistant's answer begins. Throws UsageError.
  std::vector<std::int32_t> tokens_of_chat(const std::vector<ChatMessage>& messages);
  /// Whether the process is there: it is not after it has ended, or was ended as it did not answer.
  bool running() const noexcept { return process_ > 0; }
  /// Whether the model has a chat template.
  bool has_template() const noexcept { return has_template_; }

 private:
  class Stream;

  using Clock = std::chrono::steady_clock;

  /// The answer to a request, both JSON. Throws UsageError where the process has ended or refuses, DeviceError where it
  /// does not answer in time.
  std::string ask(const std::string& request);
  void send(std::string_view text, Clock::time_point until);
  std::string next_line(Clock::time_point until);
  /// Waits until the file can be read (or written).
  void await(int file, short events, Clock::time_point until);
  [[noreturn]] void refuse_ended();
  /// Throws UsageError where an id is not below the vocabulary.
  std::vector<std::int32_t> ids_of(const std::string& answer) const;
  void start(const std::filesystem::path& script, const std::filesystem::path& folder);
  void end() noexcept;

  std::string python_;
  std::chrono::seconds patience_;  ///< for an answer
  std::int64_t vocabulary_;
  pid_t process_ = -1;
  int to_ = -1, from_ = -1;
  int errors_ = -1;    ///< file in memory that the process writes its errors to
  std::string ahead_;  ///< read behind the last line
  bool has_template_ = false;
  std::int64_t streams_ = 0;
};

}  // namespace tandem
