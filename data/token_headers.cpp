#include "data/token_headers.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "core/base/error.hpp"

namespace tandem::data_files {
namespace {

namespace fs = std::filesystem;
using namespace std::literals;

constexpr std::size_t header_words = 256;  // llm.c: 256 words of 32 bits, the first three used
constexpr std::int32_t magic_uint16 = 20240520;
constexpr std::int32_t magic_uint32 = 20240801;

std::uint64_t bytes_of(TokenWidth width) { return static_cast<std::uint64_t>(width); }

[[noreturn]] void bad_numpy(const DataFile& file, std::string_view why) {
  throw InputError(fmt::format("token file {}", file.path().string()), why,
                   "save one row of integers: numpy.save(NAME, ids.reshape(-1).astype('uint32'))");
}

/// Text behind "'key':" in the literal of a Python dict, without spaces before it; empty where there is none.
std::string_view behind(std::string_view header, std::string_view key) {
  const std::string quoted = fmt::format("'{}'", key);
  auto at = header.find(quoted);
  if (at == std::string_view::npos) return {};
  at = header.find_first_not_of(" :", at + quoted.size());
  return at == std::string_view::npos ? std::string_view() : header.substr(at);
}

/// The dict of the header, and where the array begins.
std::pair<std::string, std::uint64_t> numpy_header(const DataFile& file) {
  constexpr std::uint64_t most = 1U << 20;
  std::array<std::uint8_t, 12> head{};
  const std::uint64_t known = std::min<std::uint64_t>(head.size(), file.size());
  file.read(0, std::as_writable_bytes(std::span(head)).first(static_cast<std::size_t>(known)));
  const bool first_version = head[6] == 1;  // its length has 2 bytes, that of later ones 4
  const std::uint64_t begin = first_version ? 10 : 12;
  std::uint64_t length = 0;
  for (std::size_t i = begin; i-- > 8;) length = length << 8U | head[i];  // little endian
  if (head[6] < 1 || head[6] > 3 || length > most || begin + length > file.size()) {
    bad_numpy(file, "its NumPy header is cut off or of a version that is not known");
  }
  std::string text(static_cast<std::size_t>(length), '\0');
  file.read(begin, std::as_writable_bytes(std::span(text)));
  return {std::move(text), begin + length};
}

std::int64_t numpy_count(const DataFile& file, std::string_view shape) {
  const auto end = shape.find(')');
  if (!shape.starts_with('(') || end == std::string_view::npos) bad_numpy(file, "its NumPy header has no shape");
  const std::string_view inner = shape.substr(1, end - 1);
  std::int64_t count = -1;
  const auto [rest, error] = std::from_chars(inner.data(), inner.data() + inner.size(), count);
  const std::string_view tail(rest, static_cast<std::size_t>(inner.data() + inner.size() - rest));
  if (error != std::errc() || count < 0 || (tail != "," && tail != "L,")) {
    bad_numpy(file, fmt::format("its NumPy array has the shape {}, and tokens are one row", shape.substr(0, end + 1)));
  }
  return count;
}

/// Reads all of it in pieces, until `use(first, words)` says that it has seen enough.
template <class Word, class Use>
void each_piece(const DataFile& file, std::uint64_t offset, const Use& use) {
  std::vector<Word> piece(std::size_t{1} << 13);
  const std::uint64_t words = (file.size() - offset) / sizeof(Word);
  for (std::uint64_t first = 0; first < words; first += piece.size()) {
    const auto some =
        std::span(piece).first(static_cast<std::size_t>(std::min<std::uint64_t>(piece.size(), words - first)));
    file.read(offset + first * sizeof(Word), std::as_writable_bytes(some));
    if (use(first, some)) return;
  }
}

[[noreturn]] void bad_index(const fs::path& index, std::string_view why, std::string_view advice) {
  throw InputError(fmt::format("index {}", index.string()), why, advice);
}
constexpr auto make_again = "write both again, or move it away and give the width with --token-dtype"sv;

}  // namespace

std::optional<TokenExtent> extent_of_llmc(const DataFile& file, std::optional<TokenWidth> forced) {
  constexpr std::size_t header_bytes = header_words * sizeof(std::int32_t);
  if (file.size() < header_bytes) return std::nullopt;
  std::array<std::int32_t, 3> head{};  // magic, version, tokens
  file.read(0, std::as_writable_bytes(std::span(head)));
  if (head[0] != magic_uint16 && head[0] != magic_uint32) return std::nullopt;
  // Versions that llm.c writes: 1 for GPT-2's tokens, 7 for Llama 3's (dev/data/data_common.py, HEADERS_INFO). 1 is
  // accepted for the latter too, as nothing else in the file would differ.
  if (head[1] != 1 && !(head[0] == magic_uint32 && head[1] == 7)) {
    throw InputError(fmt::format("token file {}", file.path().string()),
                     fmt::format("its header has version {}, which is not known", head[1]), "write it again");
  }
  const TokenWidth width = forced.value_or(head[0] == magic_uint16 ? TokenWidth::uint16 : TokenWidth::uint32);
  const auto count = static_cast<std::int64_t>(static_cast<std::uint32_t>(head[2]));
  const auto body = static_cast<std::int64_t>(file.size() - header_bytes);
  if (count * static_cast<std::int64_t>(bytes_of(width)) != body) {
    throw InputError(
        fmt::format("token file {}", file.path().string()),
        fmt::format("its header promises {} tokens of {}, but {} bytes follow", count, name_of(width), body),
        "the file is cut off or of another width; write it again");
  }
  return TokenExtent{header_bytes, width, count};
}

bool is_numpy(const DataFile& file) {
  constexpr auto magic = "\x93NUMPY"sv;
  std::array<char, magic.size()> first{};
  if (file.size() < magic.size()) return false;
  file.read(0, std::as_writable_bytes(std::span(first)));
  return std::string_view(first.data(), first.size()) == magic;
}

TokenExtent extent_of_numpy(const DataFile& file) {
  if (!is_numpy(file)) bad_numpy(file, "it is no NumPy array");
  const auto [header, begin] = numpy_header(file);
  const std::string_view descr = behind(header, "descr");
  TokenExtent extent{.offset = begin};
  for (const auto& [name, width] : {std::pair("'<u2'"sv, TokenWidth::uint16),
                                    {"'<u4'"sv, TokenWidth::uint32},
                                    {"'<i4'"sv, TokenWidth::uint32},
                                    {"'<i8'"sv, TokenWidth::uint64},
                                    {"'<u8'"sv, TokenWidth::uint64}}) {
    if (descr.starts_with(name)) extent.width = width;
  }
  if (extent.width == TokenWidth::byte) {
    bad_numpy(file, fmt::format("its NumPy array is of type {}, and tokens are <u2, <u4, <i4, <i8 or <u8",
                                descr.substr(0, std::min(descr.find_first_of(",}"), std::size_t{40}))));
  }
  extent.count = numpy_count(file, behind(header, "shape"));
  const std::uint64_t body = file.size() - begin;
  if (body % bytes_of(extent.width) != 0 || body / bytes_of(extent.width) != static_cast<std::uint64_t>(extent.count)) {
    bad_numpy(file, fmt::format("its NumPy header promises {} bytes, and {} follow",
                                static_cast<std::uint64_t>(extent.count) * bytes_of(extent.width), body));
  }
  return extent;
}

fs::path index_of(const fs::path& bin) { return fs::path(bin).replace_extension(".idx"); }

std::optional<TokenWidth> width_of_index(const DataFile& bin) {
  constexpr std::uint64_t head_bytes = 34;  // magic, version, type, sequences, documents
  const fs::path path = index_of(bin.path());
  std::error_code error;
  if (!fs::exists(path, error)) return std::nullopt;
  const DataFile index(path);
  std::array<std::byte, head_bytes> head{};
  if (index.size() < head_bytes) bad_index(path, "it is cut off", make_again);
  index.read(0, head);
  const auto number = [&](std::size_t at) {
    std::uint64_t value = 0;
    std::memcpy(&value, head.data() + at, sizeof(value));
    return value;
  };
  if (std::memcmp(head.data(), "MMIDIDX\0\0", 9) != 0 || number(9) != 1) {
    bad_index(path,
              fmt::format("{} has an index beside it, of a format that is not known", bin.path().filename().string()),
              make_again);
  }
  const int type = std::to_integer<int>(head[17]);
  std::optional<TokenWidth> width;
  for (const auto& [code, meaning] :
       {std::pair(1, TokenWidth::byte), {4, TokenWidth::uint32}, {5, TokenWidth::uint64}, {8, TokenWidth::uint16}}) {
    if (code == type) width = meaning;
  }
  if (!width) {
    bad_index(path,
              fmt::format("it says that tokens are of type {} ({}), which is not read", type,
                          type == 6 || type == 7 ? "floating point" : "not known"),
              "write tokens as uint16 or int32");
  }
  const std::uint64_t sequences = number(18), documents = number(26);
  constexpr std::uint64_t of_sequence = 12, of_document = 8;
  if (sequences > index.size() / of_sequence || documents > index.size() / of_document ||
      head_bytes + sequences * of_sequence + documents * of_document > index.size()) {
    bad_index(path, "it is cut off", make_again);
  }
  std::uint64_t end = 0;
  if (sequences > 0) {
    std::int32_t length = 0;
    index.read(head_bytes + (sequences - 1) * 4, std::as_writable_bytes(std::span(&length, 1)));
    index.read(head_bytes + sequences * 4 + (sequences - 1) * 8, std::as_writable_bytes(std::span(&end, 1)));
    end += static_cast<std::uint64_t>(length) * bytes_of(*width);
  }
  if (end != bin.size()) {
    bad_index(path,
              fmt::format("it ends at byte {} of {}, which has {}: they are of other data", end,
                          bin.path().filename().string(), bin.size()),
              make_again);
  }
  return width;
}

NarrowReading read_as_uint16(const DataFile& file) {
  NarrowReading reading;
  if (file.size() == 0 || file.size() % sizeof(std::uint32_t) != 0) return reading;
  reading = {.every_second_is_zero = true, .three_of_four_are_zero = file.size() % sizeof(std::uint64_t) == 0};
  bool any = false;
  each_piece<std::uint32_t>(file, 0, [&](std::uint64_t first, std::span<const std::uint32_t> words) {
    for (std::size_t i = 0; i < words.size(); ++i) {
      if ((words[i] >> 16U) != 0) {
        reading = {};
        return true;
      }
      any = any || words[i] != 0;
      if ((first + i) % 2 == 1 && words[i] != 0) reading.three_of_four_are_zero = false;
    }
    return false;
  });
  return any ? reading : NarrowReading{};
}

bool looks_like_64_bit(const DataFile& file, const TokenExtent& extent) {
  if (extent.width != TokenWidth::uint32 || extent.count == 0 || extent.count % 2 != 0) return false;
  bool all = true, any = false;
  each_piece<std::uint64_t>(file, extent.offset, [&](std::uint64_t, std::span<const std::uint64_t> words) {
    for (const std::uint64_t word : words) {
      all = all && (word >> 32U) == 0;
      any = any || word != 0;
    }
    return !all;
  });
  return all && any;
}

}  // namespace tandem::data_files
