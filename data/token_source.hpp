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

namespace data_files {
struct TokenDescription;
}

/// Bytes of one stored token. 64-bit ids are those of NumPy arrays and of files with an index.
enum class TokenWidth : std::uint8_t { byte = 1, uint16 = 2, uint32 = 4, uint64 = 8 };

/// "uint16" or "uint32". Throws UsageError.
TokenWidth parse_token_width(std::string_view text);
std::string_view name_of(TokenWidth width) noexcept;

/// How records lie: one long row of tokens that is cut into windows; rows of one length, a record each; or such rows
/// with several whole records each, one behind another.
enum class TokenLayout : std::uint8_t { stream, rows, packed };

struct TokenSourceOptions {
  std::int64_t vocabulary = 0;            ///< every token must be below it
  std::optional<TokenWidth> token_width;  ///< width of `.bin` files' tokens, whatever the files say
  /// Documents of a stream are records that do not see each other; each ends with the end token that NAME.json states.
  bool document_attention = false;
};

/// Entries by which the tokenizer of a token file may exceed the vocabulary of the model: added tokens, of which none
/// is in the data, as every token is checked. One that is larger still is another model's.
constexpr std::int64_t most_added_tokens = 64;

/// The tokens of all files, one after another in the order given. Text is bytes as tokens, without a byte-order mark; a
/// file that ends in `.bin` or `.npy` holds token ids, and NAME.mask.bin beside it a byte per token: bit 0 where it is
/// a target, in packed rows bit 1 where it is the first of a record, which is never a target. Immutable after
/// construction, so reading is thread-safe.
class TokenSource {
 public:
  /// Opens the files and checks every token once, in parallel. Throws InputError that names the file for what is
  /// missing, unreadable, of odd length, of a width that nothing states, out of the vocabulary (with position and
  /// token) or made with a much larger one, for text that is of another kind of file or has a byte 0 (with its place),
  /// for a mask of another length or with other bytes than its layout has, packed rows or pairs without a mask, packed
  /// rows that begin within a record, rows of pairs of odd number, where masks leave no target or files no token, where
  /// text and token files, or layouts, are mixed, and where document attention is asked of text, of rows, or of a
  /// stream whose end token is not known.
  TokenSource(const std::vector<std::filesystem::path>& names, const TokenSourceOptions& options);

  std::int64_t size() const noexcept { return size_; }
  /// Whether tokens are the bytes of text.
  bool bytes() const noexcept { return bytes_; }
  TokenLayout layout() const noexcept { return layout_; }
  /// Tokens of a row; 0 for a stream.
  std::int64_t row_length() const noexcept { return row_length_; }
  /// Whether rows 2 i and 2 i + 1 are answers to one prompt, of which the first was preferred.
  bool pairs() const noexcept { return pairs_; }
  /// Whether some tokens are no targets.
  bool masked() const noexcept { return masked_; }
  /// Whether documents of the stream are records; false for packed rows, which have records without it.
  bool document_attention() const noexcept { return document_attention_ && layout_ == TokenLayout::stream; }
  /// Whether a window may hold several records, none of which may see another.
  bool bounded() const noexcept { return layout_ == TokenLayout::packed || document_attention(); }
  /// XXH3-128 of what was read of all files, as 32 hexadecimal digits: tokens, masks, widths and layout, not names, nor
  /// document attention, which is a setting of the run.
  const std::string& digest() const noexcept { return digest_; }
  /// Notices for the user about the files, a line each: left out, empty or doubtful.
  const std::vector<std::string>& notices() const noexcept { return notices_; }
  /// Tokens [position, position + tokens.size()). Throws MisuseError out of range, InputError where a
  /// file has changed under us: it has become shorter, or a token left the vocabulary.
  void read(std::int64_t position, std::span<std::int32_t> tokens) const;
  /// Targets at [position, position + targets.size()): the token where it is a target, else -1. Throws as `read`.
  void read_targets(std::int64_t position, std::span<std::int32_t> targets) const;
  /// 1 where the token is the first of a record, else 0, for [position, position + starts.size()). Throws as `read`,
  /// and MisuseError where the source is not bounded.
  void read_record_starts(std::int64_t position, std::span<std::int32_t> starts) const;

 private:
  struct Segment {
    DataFile file;
    std::optional<DataFile> mask{};  // empty: every token is a target
    std::uint64_t offset = 0;        // bytes, of the first token
    TokenWidth width = TokenWidth::byte;
    bool bare = false;       // nothing but its name says what it holds
    std::int64_t begin = 0;  // position of its first token in the row
    std::int64_t count = 0;
    std::int64_t end_token = -1;  // ends a document, where documents are records
    std::int64_t records = -1;    // number of records that its description counts
    std::string mask_hash{};
  };
  struct Checked {
    std::string hash;
    std::int64_t ends = 0;  // end tokens
  };
  void add_name(const std::filesystem::path& name, const TokenSourceOptions& options);
  void add(DataFile file, bool in_folder, const TokenSourceOptions& options);
  void add_tokens(Segment& segment, const TokenSourceOptions& options);
  void notice_bare(const Segment& segment, bool width_given);
  void add_end_token(Segment& segment, const std::optional<data_files::TokenDescription>& description) const;
  void add_mask(Segment& segment);
  void check_mask(const Segment& segment, std::int64_t first, std::span<const std::byte> mask) const;
  void join_layout(const std::filesystem::path& file, const data_files::TokenDescription& description,
                   std::int64_t count);
  template <class Use>
  void each_segment(std::int64_t position, std::span<std::int32_t> values, const Use& use) const;
  void read_tokens(const Segment& segment, std::int64_t index, std::span<std::int32_t> tokens) const;
  template <class Use>
  void each_mask(std::int64_t position, std::span<std::int32_t> values, const Use& use) const;
  void check_tokens();
  void notice_documents(const Segment& segment, std::int64_t ends);
  Checked check_segment(const Segment& segment) const;
  Checked check_range(const Segment& segment, std::int64_t begin, std::int64_t end) const;
  static void require_no_zero(const Segment& segment, std::int64_t first, const std::byte* text, std::int64_t items);
  void require_known(const Segment& segment, std::int64_t index, std::uint64_t token) const;

  std::vector<Segment> segments_;
  std::int64_t size_ = 0;
  std::int64_t only_read_ = 0;  // tokens without targets
  std::int64_t vocabulary_ = 0;
  std::int64_t row_length_ = 0;
  TokenLayout layout_ = TokenLayout::stream;
  std::int64_t empty_files_ = 0;
  std::int64_t marks_ = 0;       // files with a byte-order mark
  std::int64_t bare_files_ = 0;  // files of which nothing says what their tokens are
  std::string first_bare_;
  bool bytes_ = true;
  bool masked_ = false;
  bool pairs_ = false;
  bool document_attention_ = false;
  std::string digest_;
  std::vector<std::string> notices_;
};

}  // namespace tandem
