#pragma once
// Texts to tokens and back, as a model has them: bytes, token ids, or by its tokenizer.
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tandem {

/// Text of the tokens of one sequence, as they come.
class TextStream {
 public:
  virtual ~TextStream() = default;
  /// Text that this token completes; a character of several tokens comes with its last.
  virtual std::string next(std::int32_t token) = 0;
  /// Text of a character that was not completed.
  virtual std::string end() = 0;
};

class TextCodec {
 public:
  virtual ~TextCodec() = default;
  virtual std::vector<std::int32_t> tokens_of(const std::string& text) = 0;
  /// Stream of the tokens that follow `before`.
  virtual std::unique_ptr<TextStream> stream(std::span<const std::int32_t> before) = 0;
};

/// Tokens that are bytes. Valid UTF-8 comes as it is, other bytes and control characters (but newline and tab) as \xNN.
std::unique_ptr<TextCodec> byte_codec();
/// Token ids, separated by blanks or commas. Throws UsageError for those that are no ids below `vocabulary`. `flag`:
/// its name, for errors.
std::unique_ptr<TextCodec> id_codec(std::int64_t vocabulary, std::string_view flag);

/// Bytes as text, as byte_codec() has it.
std::string text_of_bytes(std::span<const std::int32_t> tokens);

/// Text as it may be printed: control characters but newline and tab, which a terminal would obey, as \xNN.
std::string printable(std::string_view text);

/// Lets the texts of a sequence pass until one of `stops` appears in them. A possible beginning of one is held back.
class StopFilter {
 public:
  /// `at_end`: a stop must end where the text so far does, as those of whole token ids do.
  explicit StopFilter(std::vector<std::string> stops, bool at_end = false)
      : stops_(std::move(stops)), at_end_(at_end) {}
  /// Text that may be shown now, of what was held back and `text`.
  std::string pass(std::string_view text);
  /// Text that is still held back; none where a stop has appeared.
  std::string rest();
  bool stopped() const noexcept { return stopped_; }

 private:
  std::vector<std::string> stops_;
  bool at_end_;
  std::string held_;
  bool stopped_ = false;
};

}  // namespace tandem
