#pragma once
// A long row of tokens out of files, read where they are asked for.
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/data_file.hpp"

namespace tandem {

/// Bytes of one stored token. 64-bit ids are those of NumPy arrays and of files with an index.
enum class TokenWidth : std::uint8_t { byte = 1, uint16 = 2, uint32 = 4, uint64 = 8 };

/// "uint16" or "uint32". Throws UsageError.
TokenWidth parse_token_width(std::string_view text);
std::string_view name_of(TokenWidth width) noexcept;

/// How records lie: one long row of tokens that is cut into windows, or rows of one length, a record each.
enum class TokenLayout : std::uint8_t { stream, rows };

struct TokenSourceOptions {
  std::int64_t vocabulary = 0;            ///< every token must be below it
  std::optional<TokenWidth> token_width;  ///< width of `.bin` files' tokens, whatever the files say
};

/// Entries by which the tokenizer of a token file may exceed the vocabulary of the model: added tokens, of which none
/// is in the data, as every token is checked. One that is larger still is another model's.
constexpr std::int64_t most_added_tokens = 64;

/// The tokens of all files, one after another in the order given. Text is bytes as tokens, without a byte-order mark; a
/// file that ends in `.bin` or `.npy` holds token ids, and NAME.mask.bin beside it a byte per token, 1 where it is a
/// target. Immutable after construction, so reading is thread-safe.
class TokenSource {
 public:
  /// Opens the files and checks every token once, in parallel. Throws InputError that names the file for
  /// what is missing, unreadable, of odd length, of a width that nothing states, out of the vocabulary (with position
  /// and token) or made with a much larger one, for text that is of another kind of file or has a byte 0 (with its
  /// place), for a mask of another length or with other bytes than 0 and 1, where masks leave no target or files no
  /// token, and where text and token files, or layouts, are mixed.
  TokenSource(const std::vector<std::filesystem::path>& names, const TokenSourceOptions& options);

  std::int64_t size() const noexcept { return size_; }
  /// Whether tokens are the bytes of text.
  bool bytes() const noexcept { return bytes_; }
  TokenLayout layout() const noexcept { return row_length_ > 0 ? TokenLayout::rows : TokenLayout::stream; }
  /// Tokens of a row; 0 for a stream.
  std::int64_t row_length() const noexcept { return row_length_; }
  /// Whether some tokens are no targets.
  bool masked() const noexcept { return masked_; }
  /// XXH3-128 of what was read of all files, as 32 hexadecimal digits: tokens, masks, widths and rows, not names.
  const std::string& digest() const noexcept { return digest_; }
  /// Notices for the user about the files, a line each: left out, empty or doubtful.
  const std::vector<std::string>& notices() const noexcept { return notices_; }
  /// Tokens [position, position + tokens.size()). Throws MisuseError out of range, InputError where a
  /// file has changed under us: it has become shorter, or a token left the vocabulary.
  void read(std::int64_t position, std::span<std::int32_t> tokens) const;
  /// Targets at [position, position + targets.size()): the token where it is a target, else -1. Throws as `read`.
  void read_targets(std::int64_t position, std::span<std::int32_t> targets) const;

 private:
  struct Segment {
    DataFile file;
    std::optional<DataFile> mask{};  // empty: every token is a target
    std::uint64_t offset = 0;        // bytes, of the first token
    TokenWidth width = TokenWidth::byte;
    std::int64_t begin = 0;  // position of its first token in the row
    std::int64_t count = 0;
    std::string mask_hash{};
  };
  void add_name(const std::filesystem::path& name, const TokenSourceOptions& options);
  void add(DataFile file, bool in_folder, const TokenSourceOptions& options);
  void add_tokens(Segment& segment, const TokenSourceOptions& options);
  void add_mask(Segment& segment);
  void join_layout(const std::filesystem::path& file, std::int64_t row_length, std::int64_t count);
  template <class Use>
  void each_segment(std::int64_t position, std::span<std::int32_t> values, const Use& use) const;
  void read_tokens(const Segment& segment, std::int64_t index, std::span<std::int32_t> tokens) const;
  void check_tokens();
  std::string check_segment(const Segment& segment) const;
  std::string check_range(const Segment& segment, std::int64_t begin, std::int64_t end) const;
  static void require_no_zero(const Segment& segment, std::int64_t first, const std::byte* text, std::int64_t items);
  void require_known(const Segment& segment, std::int64_t index, std::uint64_t token) const;

  std::vector<Segment> segments_;
  std::int64_t size_ = 0;
  std::int64_t only_read_ = 0;  // tokens without targets
  std::int64_t vocabulary_ = 0;
  std::int64_t row_length_ = 0;
  std::int64_t empty_files_ = 0;
  std::int64_t marks_ = 0;  // files with a byte-order mark
  bool bytes_ = true;
  bool masked_ = false;
  std::string digest_;
  std::vector<std::string> notices_;
};

}  // namespace tandem
