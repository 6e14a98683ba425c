#pragma once
// Which files the user's names stand for, and how the tokens lie in them. Internal to data.
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include "core/mapped_file.hpp"
#include "data/token_source.hpp"

namespace tandem::data_files {

/// Regular files below `name` in byte order of path (links not followed), or the file itself. Throws
/// InputError where something is missing or may not be read.
std::vector<std::filesystem::path> files_of(const std::filesystem::path& name);

bool is_token_file(const std::filesystem::path& file);

/// Where the tokens of a file begin, how wide one is, and how many there are.
struct TokenExtent {
  std::size_t offset = 0;
  TokenWidth width = TokenWidth::byte;
  std::int64_t count = 0;
};

/// Of a `.bin`: header, then the JSON beside it, then uint16; `forced` wins over both. Throws InputError
/// on a size, header or description that contradicts itself.
TokenExtent token_extent(const MappedFile& file, std::optional<TokenWidth> forced);

}  // namespace tandem::data_files
