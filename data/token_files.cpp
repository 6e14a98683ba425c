#include "data/token_files.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <span>
#include <system_error>

#include "core/base/error.hpp"
#include "core/base/json_text.hpp"
#include "core/base/nesting.hpp"

namespace tandem::data_files {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t header_words = 256;  // llm.c: 256 words of 32 bits, the first three used
constexpr std::int32_t magic_uint16 = 20240520;
constexpr std::int32_t magic_uint32 = 20240801;

[[noreturn]] void unreadable(const fs::path& path, const std::error_code& error) {
  throw InputError(fmt::format("cannot read {}", path.string()), error.message());
}

void collect(const fs::path& folder, std::vector<fs::path>& files) {
  std::error_code error;
  fs::directory_iterator entries(folder, error);
  if (error) unreadable(folder, error);
  for (; entries != fs::directory_iterator(); entries.increment(error)) {
    const fs::file_status status = entries->symlink_status(error);
    if (error) unreadable(entries->path(), error);
    if (fs::is_directory(status)) collect(entries->path(), files);
    if (fs::is_regular_file(status)) files.push_back(entries->path());
  }
  if (error) unreadable(folder, error);
}

std::size_t width_bytes(TokenWidth width) { return static_cast<std::size_t>(width); }

std::optional<TokenExtent> extent_of_header(const DataFile& file, std::optional<TokenWidth> forced) {
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
  if (count * static_cast<std::int64_t>(width_bytes(width)) != body) {
    throw InputError(
        fmt::format("token file {}", file.path().string()),
        fmt::format("its header promises {} tokens of {}, but {} bytes follow", count, name_of(width), body),
        "the file is cut off or of another width; write it again");
  }
  return TokenExtent{header_bytes, width, count};
}

[[noreturn]] void bad_description(const std::string& name, std::string_view why) {
  throw InputError(fmt::format("token description {}", name), why,
                   "expected what tools/prepare_data.py writes, such as {\"dtype\": \"uint16\"}");
}

std::int64_t natural(const nlohmann::json& json, const char* key, std::int64_t fallback, const std::string& name) {
  if (!json.contains(key) || json[key].is_null()) return fallback;
  constexpr std::uint64_t most = std::uint64_t{1} << 48;
  if (!json[key].is_number_unsigned() || json[key].get<std::uint64_t>() > most) {
    bad_description(name, fmt::format("its \"{}\" is no natural number", key));
  }
  return json[key].get<std::int64_t>();
}

}  // namespace

std::vector<fs::path> files_of(const fs::path& name) {
  std::error_code error;
  const fs::file_status status = fs::status(name, error);
  if (!fs::exists(status)) {
    throw InputError(fmt::format("cannot read {}", name.string()), "no such file or folder");
  }
  if (error) unreadable(name, error);
  if (!fs::is_directory(status)) return {name};
  std::vector<fs::path> files;
  collect(name, files);
  std::erase_if(files, [](const fs::path& file) {
    std::error_code ignored;
    return is_mask(file) ||
           (file.extension() == ".json" && fs::exists(fs::path(file).replace_extension(".bin"), ignored));
  });
  std::sort(files.begin(), files.end(), [](const fs::path& a, const fs::path& b) { return a.native() < b.native(); });
  if (files.empty()) throw InputError(fmt::format("folder {}", name.string()), "it holds no files");
  return files;
}

bool is_token_file(const fs::path& file) { return file.extension() == ".bin"; }

bool is_mask(const fs::path& file) { return file.filename().string().ends_with(".mask.bin"); }

fs::path mask_of(const fs::path& bin) { return fs::path(bin).replace_extension(".mask.bin"); }

TokenDescription parse_description(std::string_view text, const std::string& name) {
  if (nests_deeper(text)) bad_description(name, "it is nested too deep");
  const nlohmann::json json = parse_json<nlohmann::json>(text);
  if (!json.is_object()) bad_description(name, "not a JSON object");
  const auto word = [&](const char* key) -> std::string {
    if (!json.contains(key) || json[key].is_null()) return {};
    if (!json[key].is_string()) bad_description(name, fmt::format("its \"{}\" is no text", key));
    return json[key].get<std::string>();
  };
  TokenDescription description;
  const std::string dtype = word("dtype");
  if (!dtype.empty() && dtype != "uint16" && dtype != "uint32") {
    bad_description(name, fmt::format("dtype \"{}\" is neither uint16 nor uint32", dtype));
  }
  if (!dtype.empty()) description.width = parse_token_width(dtype);
  const std::string layout = word("layout");
  if (!layout.empty() && layout != "stream" && layout != "rows") {
    bad_description(name, fmt::format("layout \"{}\" is neither stream nor rows", layout));
  }
  description.vocabulary = natural(json, "vocab_size", 0, name);
  description.tokens = natural(json, "tokens", -1, name);
  if (layout != "rows") return description;
  description.layout = TokenLayout::rows;
  description.row_length = natural(json, "row_length", 0, name);
  if (description.row_length < 2) bad_description(name, "layout rows needs a \"row_length\" of at least 2");
  return description;
}

std::optional<TokenDescription> description_of(const fs::path& bin) {
  constexpr std::uintmax_t most_bytes = 1U << 20;
  const fs::path file = fs::path(bin).replace_extension(".json");
  std::error_code error;
  if (!fs::exists(file, error)) return std::nullopt;
  if (!fs::is_regular_file(file, error)) bad_description(file.string(), "it is no regular file");
  if (fs::file_size(file, error) > most_bytes) bad_description(file.string(), "it is larger than 1 MiB");
  std::ifstream stream(file, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(stream), {}};
  return parse_description(text, file.string());
}

TokenExtent token_extent(const DataFile& file, std::optional<TokenWidth> forced,
                         const std::optional<TokenDescription>& description) {
  if (auto extent = extent_of_header(file, forced)) return *extent;
  const auto described = forced ? forced : description ? description->width : std::nullopt;
  const TokenWidth width = described.value_or(TokenWidth::uint16);
  const std::uint64_t size = file.size();
  if (size % width_bytes(width) != 0) {
    throw InputError(fmt::format("token file {}", file.path().string()),
                     fmt::format("{} bytes are no multiple of a {} token", size, name_of(width)),
                     "the file is cut off, or give the width with --token-dtype");
  }
  const auto count = static_cast<std::int64_t>(size / width_bytes(width));
  if (description && !forced && description->tokens >= 0 && description->tokens != count) {
    throw InputError(fmt::format("token file {}", file.path().string()),
                     fmt::format("it has {} tokens, its description promises {}", count, description->tokens),
                     "the file is cut off or of another run; write it again");
  }
  return TokenExtent{0, width, count};
}

}  // namespace tandem::data_files
