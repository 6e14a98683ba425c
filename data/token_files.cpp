#include "data/token_files.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <system_error>

#include "core/error.hpp"

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

std::optional<TokenExtent> extent_of_header(const MappedFile& file, std::optional<TokenWidth> forced) {
  const auto bytes = file.bytes();
  constexpr std::size_t header_bytes = header_words * sizeof(std::int32_t);
  if (bytes.size() < header_bytes) return std::nullopt;
  std::array<std::int32_t, 3> head{};  // magic, version, tokens
  std::memcpy(head.data(), bytes.data(), sizeof(head));
  if (head[0] != magic_uint16 && head[0] != magic_uint32) return std::nullopt;
  if (head[1] != 1) {
    throw InputError(fmt::format("token file {}", file.path().string()),
                     fmt::format("its header has version {}, only 1 is known", head[1]), "write it again");
  }
  const TokenWidth width = forced.value_or(head[0] == magic_uint16 ? TokenWidth::uint16 : TokenWidth::uint32);
  const auto count = static_cast<std::int64_t>(static_cast<std::uint32_t>(head[2]));
  const auto body = static_cast<std::int64_t>(bytes.size() - header_bytes);
  if (count * static_cast<std::int64_t>(width_bytes(width)) != body) {
    throw InputError(
        fmt::format("token file {}", file.path().string()),
        fmt::format("its header promises {} tokens of {}, but {} bytes follow", count, name_of(width), body),
        "the file is cut off or of another width; write it again");
  }
  return TokenExtent{header_bytes, width, count};
}

std::optional<TokenWidth> width_of_description(const fs::path& bin) {
  const fs::path description = fs::path(bin).replace_extension(".json");
  std::error_code error;
  if (!fs::exists(description, error)) return std::nullopt;
  std::ifstream stream(description);
  const nlohmann::json json = nlohmann::json::parse(stream, nullptr, false);
  if (!json.is_object() || !json.contains("dtype") || !json["dtype"].is_string()) {
    throw InputError(fmt::format("token description {}", description.string()), "not a JSON object with a \"dtype\"",
                     "expected {\"dtype\": \"uint16\"} or \"uint32\", or give --token-dtype");
  }
  const auto dtype = json["dtype"].get<std::string>();
  if (dtype != "uint16" && dtype != "uint32") {
    throw InputError(fmt::format("token description {}", description.string()),
                     fmt::format("dtype \"{}\" is not known", dtype), "use uint16 or uint32");
  }
  return dtype == "uint16" ? TokenWidth::uint16 : TokenWidth::uint32;
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
  std::sort(files.begin(), files.end(), [](const fs::path& a, const fs::path& b) { return a.native() < b.native(); });
  if (files.empty()) throw InputError(fmt::format("folder {}", name.string()), "it holds no files");
  return files;
}

bool is_token_file(const fs::path& file) { return file.extension() == ".bin"; }

TokenExtent token_extent(const MappedFile& file, std::optional<TokenWidth> forced) {
  if (auto extent = extent_of_header(file, forced)) return *extent;
  const auto described = forced ? forced : width_of_description(file.path());
  const TokenWidth width = described.value_or(TokenWidth::uint16);
  const std::size_t size = file.bytes().size();
  if (size % width_bytes(width) != 0) {
    throw InputError(fmt::format("token file {}", file.path().string()),
                     fmt::format("{} bytes are no multiple of a {} token", size, name_of(width)),
                     "the file is cut off, or give the width with --token-dtype");
  }
  return TokenExtent{0, width, static_cast<std::int64_t>(size / width_bytes(width))};
}

}  // namespace tandem::data_files
