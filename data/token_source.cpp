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
    : vocabulary_(options.vocabulary) {
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
  join_layout(segment.file.path(), description ? description->row_length : 0, extent.count);
  segment.offset = extent.offset;
  segment.width = extent.width;
  segment.count = extent.count;
  add_mask(segment);
}

void TokenSource::add_mask(Segment& segment) {
  const auto file = data_files::mask_of(segment.file.path());
  std::error_code error;
  if (!std::filesystem::exists(file, error)) return;
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
    const auto* const odd = std::find_if(mask, mask + items, [](std::byte b) { return b > std::byte{1}; });
    if (odd != mask + items) {
      throw InputError(fmt::format("mask {}", file.string()),
                       fmt::format("byte {} is {}, neither 0 nor 1", first + (odd - mask), static_cast<int>(*odd)),
                       "write it again with tools/prepare_data.py");
    }
    only_read_ += std::count(mask, mask + items, std::byte{0});
  });
  segment.mask_hash = hash.text();
  masked_ = true;
}

void TokenSource::join_layout(const std::filesystem::path& file, std::int64_t row_length, std::int64_t count) {
  if (size_ > 0 && row_length != row_length_) {
    throw InputError(fmt::format("data {}", file.string()), "its layout is another than that of the files before it",
                     "give files of one layout and row length");
  }
  row_length_ = row_length;
  if (row_length > 0 && count % row_length != 0) {
    throw InputError(fmt::format("data {}", file.string()),
                     fmt::format("{} tokens are no multiple of its row length {}", count, row_length),
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

/// Checks a block of tokens, and returns its hash.
std::string TokenSource::check_range(const Segment& segment, std::int64_t begin, std::int64_t end) const {
  Hash128 hash;
  tokens_in_pieces(segment.file, segment.offset, segment.width, begin, end,
                   [&](std::int64_t first, std::int64_t items, const auto& token) {
                     hash.add(token.bytes, static_cast<std::size_t>(items) * static_cast<std::size_t>(segment.width));
                     if (bytes_) require_no_zero(segment, first, token.bytes, items);
                     if (bytes_ && vocabulary_ >= 256) return;
                     std::uint64_t most = 0;
                     for (std::int64_t i = 0; i < items; ++i) most = std::max<std::uint64_t>(most, token(i));
                     if (most < static_cast<std::uint64_t>(vocabulary_)) return;
                     for (std::int64_t i = 0; i < items; ++i) require_known(segment, first + i, token(i));
                   });
  return hash.text();
}

/// Checks all blocks of a segment, shared by threads.
std::string TokenSource::check_segment(const Segment& segment) const {
  const auto most_workers = static_cast<std::int64_t>(std::clamp(std::thread::hardware_concurrency(), 1U, 16U));
  const std::int64_t blocks = (segment.count + block_tokens - 1) / block_tokens;
  const std::int64_t workers = std::min(most_workers, blocks);
  std::vector<std::string> hashes(static_cast<std::size_t>(blocks));
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(workers));
  const auto work = [&](std::int64_t worker) noexcept {
    try {
      for (std::int64_t i = blocks * worker / workers; i < blocks * (worker + 1) / workers; ++i) {
        hashes[static_cast<std::size_t>(i)] =
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
  for (const std::string& block : hashes) add_text(hash, block);
  return hash.text();
}

void TokenSource::check_tokens() {
  Hash128 hash;
  add_number(hash, row_length_);
  for (const auto& segment : segments_) {
    add_number(hash, static_cast<std::int64_t>(segment.width));
    add_number(hash, segment.count);
    add_text(hash, check_segment(segment));
    add_text(hash, segment.mask_hash);
  }
  digest_ = hash.text();
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

void TokenSource::read_targets(std::int64_t position, std::span<std::int32_t> targets) const {
  read(position, targets);
  if (!masked_) return;
  each_segment(position, targets, [](const Segment& segment, std::int64_t index, std::span<std::int32_t> part) {
    if (!segment.mask) return;
    in_pieces(*segment.mask, static_cast<std::uint64_t>(index), static_cast<std::int64_t>(part.size()), 1,
              [&](std::int64_t first, const std::byte* mask, std::int64_t items) {
                for (std::int64_t i = 0; i < items; ++i) {
                  if (mask[i] == std::byte{0}) part[static_cast<std::size_t>(first + i)] = -1;
                }
              });
  });
}

}  // namespace tandem
