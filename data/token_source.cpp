#include "data/token_source.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <system_error>
#include <thread>

#include "core/error.hpp"
#include "data/token_files.hpp"

namespace tandem {
namespace {

template <class T>
T load(const std::byte* data, std::int64_t index) noexcept {
  T value;
  std::memcpy(&value, data + static_cast<std::size_t>(index) * sizeof(T), sizeof(T));
  return value;
}

template <class T>
std::uint32_t largest(const std::byte* data, std::int64_t begin, std::int64_t end) noexcept {
  T result = 0;
  for (std::int64_t i = begin; i < end; ++i) result = std::max(result, load<T>(data, i));
  return result;
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
  }
  return "unknown";
}

std::uint32_t TokenSource::Segment::token(std::int64_t index) const noexcept {
  const std::byte* data = file.bytes().data() + offset;
  switch (width) {
    case TokenWidth::byte:
      return load<std::uint8_t>(data, index);
    case TokenWidth::uint16:
      return load<std::uint16_t>(data, index);
    case TokenWidth::uint32:
      return load<std::uint32_t>(data, index);
  }
  return 0;
}

TokenSource::TokenSource(const std::vector<std::filesystem::path>& names, const TokenSourceOptions& options)
    : vocabulary_(options.vocabulary) {
  bool first = true;
  for (const auto& name : names) {
    if (data_files::is_mask(name)) {
      throw InputError(fmt::format("data {}", name.string()), "a mask, not tokens", "name the .bin that it belongs to");
    }
    for (const auto& file : data_files::files_of(name)) {
      const bool text = !data_files::is_token_file(file);
      if (!first && text != bytes_) {
        throw InputError(fmt::format("data {}", file.string()), "text and .bin token files are mixed",
                         "give one kind; tools/prepare_data.py makes a .bin of text");
      }
      bytes_ = text;
      first = false;
      add(MappedFile(file), options);
    }
  }
  if (size_ == 0) {
    throw InputError(fmt::format("data {}", names.empty() ? std::string("(none)") : names.front().string()),
                     "it holds no tokens");
  }
  check_tokens();
}

void TokenSource::add(MappedFile file, const TokenSourceOptions& options) {
  Segment segment;
  if (bytes_) {
    segment.count = static_cast<std::int64_t>(file.bytes().size());
  } else {
    const auto description = data_files::description_of(file.path());
    if (description && description->vocabulary > vocabulary_) {
      throw InputError(
          fmt::format("data {}", file.path().string()),
          fmt::format("its tokenizer has a vocabulary of {}, the model {}", description->vocabulary, vocabulary_),
          "prepare it with the model's own tokenizer");
    }
    const auto extent = data_files::token_extent(file, options.token_width, description);
    join_layout(file.path(), description ? description->row_length : 0, extent.count);
    segment.offset = extent.offset;
    segment.width = extent.width;
    segment.count = extent.count;
  }
  segment.begin = size_;
  segment.file = std::move(file);
  if (!bytes_) add_mask(segment);
  if (segment.count == 0) return;
  size_ += segment.count;
  segments_.push_back(std::move(segment));
}

void TokenSource::add_mask(Segment& segment) {
  const auto file = data_files::mask_of(segment.file.path());
  std::error_code error;
  if (!std::filesystem::exists(file, error)) return;
  segment.mask = MappedFile(file);
  const auto bytes = segment.mask.bytes();
  if (static_cast<std::int64_t>(bytes.size()) != segment.count) {
    throw InputError(
        fmt::format("mask {}", file.string()),
        fmt::format("it has {} bytes, {} has {} tokens", bytes.size(), segment.file.path().string(), segment.count),
        "write both again with tools/prepare_data.py");
  }
  const auto odd = std::find_if(bytes.begin(), bytes.end(), [](std::byte b) { return b > std::byte{1}; });
  if (odd != bytes.end()) {
    throw InputError(fmt::format("mask {}", file.string()),
                     fmt::format("byte {} is {}, neither 0 nor 1", odd - bytes.begin(), static_cast<int>(*odd)),
                     "write it again with tools/prepare_data.py");
  }
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

void TokenSource::refuse(const Segment& segment, std::int64_t index) const {
  throw InputError(
      fmt::format("data {}", segment.file.path().string()),
      fmt::format("token {} at position {} is beyond the vocabulary of {}", segment.token(index), index, vocabulary_),
      "use the model's own tokens, or check the width with --token-dtype");
}

void TokenSource::check_range(const Segment& segment, std::int64_t begin, std::int64_t end) const {
  const std::byte* data = segment.file.bytes().data() + segment.offset;
  std::uint32_t most = 0;
  switch (segment.width) {
    case TokenWidth::byte:
      most = largest<std::uint8_t>(data, begin, end);
      break;
    case TokenWidth::uint16:
      most = largest<std::uint16_t>(data, begin, end);
      break;
    case TokenWidth::uint32:
      most = largest<std::uint32_t>(data, begin, end);
      break;
  }
  if (static_cast<std::int64_t>(most) < vocabulary_) return;
  while (static_cast<std::int64_t>(segment.token(begin)) < vocabulary_) ++begin;
  refuse(segment, begin);
}

void TokenSource::check_tokens() const {
  const auto workers = static_cast<std::int64_t>(std::clamp(std::thread::hardware_concurrency(), 1U, 16U));
  constexpr std::int64_t worth_a_thread = std::int64_t{1} << 22;
  for (const auto& segment : segments_) {
    if (segment.width == TokenWidth::byte && vocabulary_ >= 256) continue;
    const std::int64_t parts = std::min(workers, 1 + segment.count / worth_a_thread);
    std::vector<std::exception_ptr> errors(static_cast<std::size_t>(parts));
    {
      std::vector<std::jthread> threads;
      for (std::int64_t part = 0; part < parts; ++part) {
        threads.emplace_back([&, part] {
          try {
            check_range(segment, segment.count * part / parts, segment.count * (part + 1) / parts);
          } catch (...) {
            errors[static_cast<std::size_t>(part)] = std::current_exception();
          }
        });
      }
    }
    for (const auto& error : errors) {
      if (error) std::rethrow_exception(error);  // the first part's: the first bad token of the file
    }
  }
}

void TokenSource::require_range(std::int64_t position, std::size_t count) const {
  const std::int64_t end = position + static_cast<std::int64_t>(count);
  if (position < 0 || end > size_) {
    throw MisuseError("tokens read out of range", fmt::format("[{}, {}) of {}", position, end, size_));
  }
}

std::vector<TokenSource::Segment>::const_iterator TokenSource::segment_at(std::int64_t position) const {
  return std::prev(std::upper_bound(segments_.begin(), segments_.end(), position,
                                    [](std::int64_t p, const Segment& s) { return p < s.begin; }));
}

void TokenSource::read(std::int64_t position, std::span<std::int32_t> tokens) const {
  require_range(position, tokens.size());
  auto segment = segment_at(position);
  std::int64_t index = position - segment->begin;
  for (std::int32_t& to : tokens) {
    if (index == segment->count) {
      ++segment;
      index = 0;
    }
    const std::uint32_t token = segment->token(index);
    if (static_cast<std::int64_t>(token) >= vocabulary_) refuse(*segment, index);
    to = static_cast<std::int32_t>(token);
    ++index;
  }
}

void TokenSource::read_targets(std::int64_t position, std::span<std::int32_t> targets) const {
  read(position, targets);
  if (!masked_) return;
  auto segment = segment_at(position);
  std::int64_t index = position - segment->begin;
  for (std::int32_t& target : targets) {
    if (index == segment->count) {
      ++segment;
      index = 0;
    }
    const auto mask = segment->mask.bytes();
    if (!mask.empty() && mask[static_cast<std::size_t>(index)] == std::byte{0}) target = -1;
    ++index;
  }
}

}  // namespace tandem
