#include "data/token_source.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <system_error>
#include <thread>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/hash128.hpp"
#include "data/token_files.hpp"

namespace tandem {
namespace {

constexpr std::size_t piece_bytes = std::size_t{1} << 14;  // on the stack of the thread that reads

/// Reads `count` items of `item_bytes` from byte `offset` on, and hands them to `use(first, bytes, items)` in pieces.
template <class Use>
void in_pieces(const DataFile& file, std::uint64_t offset, std::int64_t count, std::size_t item_bytes, const Use& use) {
  std::array<std::byte, piece_bytes> piece{};
  const auto most = static_cast<std::int64_t>(piece_bytes / item_bytes);
  for (std::int64_t first = 0; first < count; first += most) {
    const std::int64_t items = std::min(most, count - first);
    const auto bytes = std::span(piece).first(static_cast<std::size_t>(items) * item_bytes);
    file.read(offset + static_cast<std::uint64_t>(first) * item_bytes, bytes);
    use(first, bytes.data(), items);
  }
}

template <class T>
T load(const std::byte* data, std::int64_t index) noexcept {
  T value;
  std::memcpy(&value, data + static_cast<std::size_t>(index) * sizeof(T), sizeof(T));
  return value;
}

/// Tokens of one width, as a piece of the file has them.
template <class T>
struct StoredTokens {
  const std::byte* bytes;
  T operator()(std::int64_t index) const noexcept { return load<T>(bytes, index); }
};

template <class T, class Use>
void in_pieces_of(const DataFile& file, std::uint64_t offset, std::int64_t begin, std::int64_t end, const Use& use) {
  in_pieces(file, offset + static_cast<std::uint64_t>(begin) * sizeof(T), end - begin, sizeof(T),
            [&](std::int64_t first, const std::byte* bytes, std::int64_t items) {
              use(begin + first, items, StoredTokens<T>{bytes});
            });
}

/// Calls `use(first, items, token)` for tokens [begin, end) in pieces, where `token(i)` is that at first + i; the type
/// of `token` follows from the width, so that loops over it are made for each.
template <class Use>
void tokens_in_pieces(const DataFile& file, std::uint64_t offset, TokenWidth width, std::int64_t begin,
                      std::int64_t end, const Use& use) {
  switch (width) {
    case TokenWidth::byte:
      return in_pieces_of<std::uint8_t>(file, offset, begin, end, use);
    case TokenWidth::uint16:
      return in_pieces_of<std::uint16_t>(file, offset, begin, end, use);
    case TokenWidth::uint32:
      return in_pieces_of<std::uint32_t>(file, offset, begin, end, use);
    case TokenWidth::uint64:
      return in_pieces_of<std::uint64_t>(file, offset, begin, end, use);
  }
}

/// Tokens that are hashed together: a file's digest does not depend on the threads that share it.
constexpr std::int64_t block_tokens = std::int64_t{1} << 22;

// Bits of a mask's byte.
constexpr std::byte target_bit{1};
constexpr std::byte first_bit{2};  // first token of a record: nothing predicts it, so it is no target

bool is_target(std::byte mask) noexcept { return (mask & (target_bit | first_bit)) == target_bit; }
bool is_first(std::byte mask) noexcept { return (mask & first_bit) != std::byte{0}; }

template <class Token>
std::int64_t count_of(std::int64_t wanted, std::int64_t items, const Token& token) {
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < items; ++i)
    count += static_cast<std::uint64_t>(token(i)) == static_cast<std::uint64_t>(wanted) ? 1 : 0;
  return count;
}

void add_number(Hash128& hash, std::int64_t number) { hash.add(&number, sizeof(number)); }
void add_text(Hash128& hash, std::string_view text) { hash.add(text.data(), text.size()); }

std::string counted(std::int64_t count, std::string_view what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

}  // namespace

TokenWidth parse_token_width(std::string_view text) {
  if (text == "uint16") return TokenWidth::uint16;
  if (text == "uint32") return TokenWidth::uint32;
  throw UsageError(fmt::format("token width \"{}\"", text), "not known", "use uint16 or uint32");
}

std::string_view name_of(TokenWidth width) noexcept {
  switch (width) {
    case TokenWidth::byte:
      return "byte";
    case TokenWidth::uint16:
      return "uint16";
    case TokenWidth::uint32:
      return "uint32";
    case TokenWidth::uint64:
      return "uint64";
  }
  return "unknown";
}

TokenSource::TokenSource(const std::vector<std::filesystem::path>& names, const TokenSourceOptions& options)
    : vocabulary_(options.vocabulary), document_attention_(options.document_attention) {
  for (const auto& name : names) add_name(name, options);
  const std::string what = fmt::format("data {}", names.empty() ? std::string("(none)") : names.front().string());
  if (size_ == 0) throw InputError(what, "it holds no tokens");
  if (only_read_ == size_) {
    throw InputError(what, "its mask leaves no token to be a target", "write both again with tools/prepare_data.py");
  }
  if (empty_files_ > 0)
    notices_.push_back(fmt::format("{}: {} without a token", what, counted(empty_files_, "empty file")));
  if (marks_ > 0)
    notices_.push_back(fmt::format("{}: the byte-order mark of {} is left out", what, counted(marks_, "file")));
  if (bare_files_ > 0) {
    const std::string others = bare_files_ > 1 ? fmt::format(" and {} more", bare_files_ - 1) : std::string();
    notices_.push_back(fmt::format("data {}{}: nothing says what its tokens are, so it is taken for a stream of uint16",
                                   first_bare_, others));
  }
  check_tokens();
}

void TokenSource::add_name(const std::filesystem::path& name, const TokenSourceOptions& options) {
  if (data_files::is_mask(name)) {
    throw InputError(fmt::format("data {}", name.string()), "a mask, not tokens", "name the .bin that it belongs to");
  }
  const data_files::FoundFiles found = data_files::files_of(name);
  if (found.hidden > 0) {
    notices_.push_back(fmt::format("folder {}: {} left out, whose names begin with a dot", name.string(),
                                   counted(found.hidden, "hidden file")));
  }
  if (found.links > 0) {
    notices_.push_back(fmt::format("folder {}: {} left out: links in folders are not followed", name.string(),
                                   counted(found.links, "link")));
  }
  for (const auto& file : found.files) {
    const bool text = !data_files::is_token_file(file);
    if ((!segments_.empty() || empty_files_ > 0) && text != bytes_) {
      throw InputError(fmt::format("data {}", file.string()), "text and token files are mixed",
                       "give one kind; tools/prepare_data.py makes a .bin of text");
    }
    bytes_ = text;
    add(DataFile(file), found.in_folder, options);
  }
}

void TokenSource::add(DataFile file, bool in_folder, const TokenSourceOptions& options) {
  Segment segment{.file = std::move(file), .begin = size_};
  if (bytes_) {
    if (document_attention_) {
      throw InputError(fmt::format("data {}", segment.file.path().string()),
                       "document attention needs end tokens, and text has none",
                       "make a token file of it with tools/prepare_data.py, or train without --document-attention");
    }
    segment.offset = data_files::require_text(segment.file, in_folder);
    segment.count = static_cast<std::int64_t>(segment.file.size() - segment.offset);
    if (segment.offset > 0) ++marks_;
  } else {
    add_tokens(segment, options);
  }
  if (segment.count == 0) {
    ++empty_files_;
    return;
  }
  size_ += segment.count;
  segments_.push_back(std::move(segment));
}

void TokenSource::add_tokens(Segment& segment, const TokenSourceOptions& options) {
  const auto description = data_files::description_of(segment.file.path());
  if (description && description->vocabulary > vocabulary_) {
    const std::string what = fmt::format("data {}", segment.file.path().string());
    const std::string why =
        fmt::format("its tokenizer has a vocabulary of {}, the model {}", description->vocabulary, vocabulary_);
    if (description->vocabulary > vocabulary_ + most_added_tokens) {
      throw InputError(what, why, "prepare it with the model's own tokenizer");
    }
    notices_.push_back(fmt::format("{}: {}; no token may be beyond that", what, why));
  }
  const auto extent = data_files::token_extent(segment.file, options.token_width, description, vocabulary_, notices_);
  join_layout(segment.file.path(), description.value_or(data_files::TokenDescription()), extent.count);
  segment.offset = extent.offset;
  segment.width = extent.width;
  segment.count = extent.count;
  segment.bare = extent.bare;
  if (segment.bare && segment.count > 0) notice_bare(segment, options.token_width.has_value());
  if (document_attention_) add_end_token(segment, description);
  add_mask(segment);
}

/// A file alone is taken for a stream; where what belongs to it says that it was more once, this is told of each.
void TokenSource::notice_bare(const Segment& segment, bool width_given) {
  const std::filesystem::path& path = segment.file.path();
  if (const std::string beside = data_files::tool_file_beside(path); !beside.empty()) {
    notices_.push_back(fmt::format(
        "data {}: {} is missing, though {} lies beside it; taken for a stream of {}, which cuts rows "
        "anywhere: put it back, or write both again with tools/prepare_data.py",
        path.string(), data_files::description_path(path).filename().string(), beside, name_of(segment.width)));
  } else if (!width_given) {
    if (++bare_files_ == 1) first_bare_ = path.string();
  }
}

void TokenSource::add_end_token(Segment& segment,
                                const std::optional<data_files::TokenDescription>& description) const {
  if (layout_ == TokenLayout::packed) return;
  const std::filesystem::path& path = segment.file.path();
  const std::string what = fmt::format("data {}", path.string());
  if (layout_ == TokenLayout::rows) {
    throw InputError(what, "document attention is for streams, and each of its rows is one record already",
                     "train without --document-attention");
  }
  const std::string json = std::filesystem::path(path).replace_extension(".json").string();
  if (!description || description->end_token < 0) {
    throw InputError(what, "document attention needs the token that ends a document, and nothing states it",
                     fmt::format("add \"end_token\": ID to {}", json));
  }
  if (description->end_token >= vocabulary_) {
    throw InputError(
        what, fmt::format("its end token {} is beyond the vocabulary of {}", description->end_token, vocabulary_),
        fmt::format("correct \"end_token\" in {}", json));
  }
  segment.end_token = description->end_token;
  segment.records = description->records;
}

void TokenSource::add_mask(Segment& segment) {
  const auto file = data_files::mask_of(segment.file.path());
  std::error_code error;
  if (!std::filesystem::exists(file, error)) {
    if ((layout_ != TokenLayout::packed && !pairs_) || segment.count == 0) return;
    throw InputError(fmt::format("data {}", segment.file.path().string()),
                     fmt::format("{} begin, and {} is missing",
                                 pairs_ ? "pairs of answers need a mask, which says where answers"
                                        : "packed rows need a mask, which says where records",
                                 file.filename().string()),
                     "put it beside the tokens, or write both again with tools/prepare_data.py");
  }
  segment.mask.emplace(file);
  if (static_cast<std::int64_t>(segment.mask->size()) != segment.count) {
    throw InputError(fmt::format("mask {}", file.string()),
                     fmt::format("it has {} bytes, {} has {} tokens", segment.mask->size(),
                                 segment.file.path().string(), segment.count),
                     "write both again with tools/prepare_data.py");
  }
  Hash128 hash;
  in_pieces(*segment.mask, 0, segment.count, 1, [&](std::int64_t first, const std::byte* mask, std::int64_t items) {
    hash.add(mask, static_cast<std::size_t>(items));
    check_mask(segment, first, {mask, static_cast<std::size_t>(items)});
    only_read_ += items - std::count_if(mask, mask + items, is_target);
  });
  segment.mask_hash = hash.text();
  masked_ = true;
}

/// Checks bytes of a mask, the first of which has the index `first`.
void TokenSource::check_mask(const Segment& segment, std::int64_t first, std::span<const std::byte> mask) const {
  const auto refuse = [&](std::int64_t index, std::string_view why) {
    throw InputError(
        fmt::format("mask {}", segment.mask->path().string()),
        fmt::format("byte {} is {}, {}", index, static_cast<int>(mask[static_cast<std::size_t>(index - first)]), why),
        segment.bare ? fmt::format("if it is of packed rows, put back {}, which says so",
                                   data_files::description_path(segment.file.path()).filename().string())
                     : std::string("write it again with tools/prepare_data.py"));
  };
  const bool packed = layout_ == TokenLayout::packed;
  const std::byte most = packed ? target_bit | first_bit : target_bit;
  const auto odd = std::find_if(mask.begin(), mask.end(), [&](std::byte b) { return b > most; });
  if (odd != mask.end()) refuse(first + (odd - mask.begin()), packed ? "not of 0 to 3" : "neither 0 nor 1");
  if (!packed) return;
  const std::int64_t end = first + static_cast<std::int64_t>(mask.size());
  for (std::int64_t row = (first + row_length_ - 1) / row_length_ * row_length_; row < end; row += row_length_) {
    if (!is_first(mask[static_cast<std::size_t>(row - first)]))
      refuse(row, "but a row of packed data begins a record there: 2");
  }
}

void TokenSource::join_layout(const std::filesystem::path& file, const data_files::TokenDescription& description,
                              std::int64_t count) {
  const std::int64_t row_length = description.row_length;
  const std::string what = fmt::format("data {}", file.string());
  if (size_ > 0 && (description.layout != layout_ || row_length != row_length_)) {
    throw InputError(what, "its layout is another than that of the files before it",
                     "give files of one layout and row length");
  }
  if (size_ > 0 && description.pairs != pairs_) {
    throw InputError(what, "pairs of answers and other records are mixed", "give files of one kind");
  }
  pairs_ = description.pairs;
  layout_ = description.layout;
  row_length_ = row_length;
  if (row_length > 0 && count % row_length != 0) {
    throw InputError(what, fmt::format("{} tokens are no multiple of its row length {}", count, row_length),
                     "the file is cut off; write it again");
  }
  if (pairs_ && count / row_length % 2 != 0) {
    throw InputError(what, fmt::format("{} rows are no pairs", count / row_length),
                     "the file is cut off; write it again");
  }
}

void TokenSource::require_known(const Segment& segment, std::int64_t index, std::uint64_t token) const {
  if (token < static_cast<std::uint64_t>(vocabulary_)) return;
  const bool negative = segment.width == TokenWidth::uint64 && (token >> 63U) != 0;
  const std::string shown = negative ? std::to_string(static_cast<std::int64_t>(token)) : std::to_string(token);
  throw InputError(fmt::format("data {}", segment.file.path().string()),
                   fmt::format("token {} at position {} is beyond the vocabulary of {}", shown, index, vocabulary_),
                   bytes_ ? "use a model that has a token for each byte"
                   : segment.file.path().extension() == ".npy"
                       ? "use the model's own tokens"
                       : "use the model's own tokens, or check the width with --token-dtype");
}

/// A byte 0 is in no text, and in most of all else.
void TokenSource::require_no_zero(const Segment& segment, std::int64_t first, const std::byte* text,
                                  std::int64_t items) {
  const auto* const zero = static_cast<const std::byte*>(std::memchr(text, 0, static_cast<std::size_t>(items)));
  if (zero == nullptr) return;
  throw InputError(
      fmt::format("data {}", segment.file.path().string()),
      fmt::format("byte {} is 0, which no text has", static_cast<std::int64_t>(segment.offset) + first + (zero - text)),
      "leave the file out, write it as UTF-8, or prepare it with tools/prepare_data.py");
}

/// Checks a block of tokens.
TokenSource::Checked TokenSource::check_range(const Segment& segment, std::int64_t begin, std::int64_t end) const {
  Hash128 hash;
  std::int64_t ends = 0;
  tokens_in_pieces(segment.file, segment.offset, segment.width, begin, end,
                   [&](std::int64_t first, std::int64_t items, const auto& token) {
                     hash.add(token.bytes, static_cast<std::size_t>(items) * static_cast<std::size_t>(segment.width));
                     if (segment.end_token >= 0) ends += count_of(segment.end_token, items, token);
                     if (bytes_) require_no_zero(segment, first, token.bytes, items);
                     if (bytes_ && vocabulary_ >= 256) return;
                     std::uint64_t most = 0;
                     for (std::int64_t i = 0; i < items; ++i) most = std::max<std::uint64_t>(most, token(i));
                     if (most < static_cast<std::uint64_t>(vocabulary_)) return;
                     for (std::int64_t i = 0; i < items; ++i) require_known(segment, first + i, token(i));
                   });
  return {hash.text(), ends};
}

/// Checks all blocks of a segment, shared by threads.
TokenSource::Checked TokenSource::check_segment(const Segment& segment) const {
  const auto most_workers = static_cast<std::int64_t>(std::clamp(std::thread::hardware_concurrency(), 1U, 16U));
  const std::int64_t blocks = (segment.count + block_tokens - 1) / block_tokens;
  const std::int64_t workers = std::min(most_workers, blocks);
  std::vector<Checked> checked(static_cast<std::size_t>(blocks));
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(workers));
  const auto work = [&](std::int64_t worker) noexcept {
    try {
      for (std::int64_t i = blocks * worker / workers; i < blocks * (worker + 1) / workers; ++i) {
        checked[static_cast<std::size_t>(i)] =
            check_range(segment, i * block_tokens, std::min(segment.count, (i + 1) * block_tokens));
      }
    } catch (...) {
      errors[static_cast<std::size_t>(worker)] = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> threads;  // in a folder of thousands of small files there is none
    for (std::int64_t worker = 1; worker < workers; ++worker) threads.emplace_back([&, worker] { work(worker); });
    work(0);
  }
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);  // the first part's: the first bad token of the file
  }
  Hash128 hash;
  std::int64_t ends = 0;
  for (const Checked& block : checked) {
    add_text(hash, block.hash);
    ends += block.ends;
  }
  return {hash.text(), ends};
}

void TokenSource::check_tokens() {
  Hash128 hash;
  add_number(hash, row_length_);
  if (layout_ == TokenLayout::packed) add_text(hash, "packed");
  if (pairs_) add_text(hash, "pairs");
  for (const auto& segment : segments_) {
    const Checked checked = check_segment(segment);
    add_number(hash, static_cast<std::int64_t>(segment.width));
    add_number(hash, segment.count);
    add_text(hash, checked.hash);
    add_text(hash, segment.mask_hash);
    if (document_attention()) notice_documents(segment, checked.ends);
  }
  digest_ = hash.text();
}

/// Tells where end tokens hardly end the documents: those of chats may end each turn.
void TokenSource::notice_documents(const Segment& segment, std::int64_t ends) {
  const std::string what = fmt::format("data {}", segment.file.path().string());
  if (ends == 0) {
    notices_.push_back(
        fmt::format("{}: its end token {} is not in it, so it is one document", what, segment.end_token));
  } else if (segment.records >= 0 && ends != segment.records) {
    notices_.push_back(
        fmt::format("{}: its end token {} is {} times in its {} records; document attention cuts at each", what,
                    segment.end_token, ends, segment.records));
  }
}

/// Calls `use(segment, index, part)` for each part of `values`, which stand for the tokens from `position` on: it lies
/// in the segment from `index` on.
template <class Use>
void TokenSource::each_segment(std::int64_t position, std::span<std::int32_t> values, const Use& use) const {
  const std::int64_t end = position + static_cast<std::int64_t>(values.size());
  if (position < 0 || end > size_) {
    throw MisuseError("tokens read out of range", fmt::format("[{}, {}) of {}", position, end, size_));
  }
  auto segment = std::prev(std::upper_bound(segments_.begin(), segments_.end(), position,
                                            [](std::int64_t p, const Segment& s) { return p < s.begin; }));
  for (; !values.empty(); ++segment) {
    const std::int64_t index = position - segment->begin;
    const auto count = std::min(values.size(), static_cast<std::size_t>(segment->count - index));
    use(*segment, index, values.first(count));
    position += static_cast<std::int64_t>(count);
    values = values.subspan(count);
  }
}

void TokenSource::read_tokens(const Segment& segment, std::int64_t index, std::span<std::int32_t> tokens) const {
  const std::int64_t end = index + static_cast<std::int64_t>(tokens.size());
  tokens_in_pieces(segment.file, segment.offset, segment.width, index, end,
                   [&](std::int64_t first, std::int64_t items, const auto& token) {
                     for (std::int64_t i = 0; i < items; ++i) {
                       require_known(segment, first + i, token(i));
                       tokens[static_cast<std::size_t>(first + i - index)] = static_cast<std::int32_t>(token(i));
                     }
                   });
}

void TokenSource::read(std::int64_t position, std::span<std::int32_t> tokens) const {
  each_segment(position, tokens, [&](const Segment& segment, std::int64_t index, std::span<std::int32_t> part) {
    read_tokens(segment, index, part);
  });
}

/// Calls `use(value, byte)` for each of `values` whose token has a byte of a mask; they stand for the tokens from
/// `position` on.
template <class Use>
void TokenSource::each_mask(std::int64_t position, std::span<std::int32_t> values, const Use& use) const {
  each_segment(position, values, [&](const Segment& segment, std::int64_t index, std::span<std::int32_t> part) {
    if (!segment.mask) return;
    in_pieces(*segment.mask, static_cast<std::uint64_t>(index), static_cast<std::int64_t>(part.size()), 1,
              [&](std::int64_t first, const std::byte* mask, std::int64_t items) {
                for (std::int64_t i = 0; i < items; ++i) use(part[static_cast<std::size_t>(first + i)], mask[i]);
              });
  });
}

void TokenSource::read_targets(std::int64_t position, std::span<std::int32_t> targets) const {
  read(position, targets);
  if (!masked_) return;
  each_mask(position, targets, [](std::int32_t& target, std::byte mask) {
    if (!is_target(mask)) target = -1;
  });
}

void TokenSource::read_record_starts(std::int64_t position, std::span<std::int32_t> starts) const {
  if (!bounded()) throw MisuseError("record starts of data without records");
  if (starts.empty()) return;
  if (layout_ == TokenLayout::packed) {
    each_mask(position, starts, [](std::int32_t& start, std::byte mask) { start = is_first(mask) ? 1 : 0; });
    return;
  }
  if (position == 0) starts.front() = 1;
  // A token starts a document where the one before it ends another.
  const auto known = starts.subspan(position == 0 ? 1 : 0);
  each_segment(position == 0 ? 0 : position - 1, known,
               [&](const Segment& segment, std::int64_t index, std::span<std::int32_t> part) {
                 read_tokens(segment, index, part);
                 for (std::int32_t& value : part) value = value == segment.end_token ? 1 : 0;
               });
  // The first token of a file begins a document, too.
  for (const Segment& segment : segments_) {
    const std::int64_t at = segment.begin - position;
    if (at >= 0 && at < std::ssize(starts)) starts[static_cast<std::size_t>(at)] = 1;
  }
}

}  // namespace tandem
