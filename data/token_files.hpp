#pragma once
// Which files the user's names stand for, and how the tokens lie in them. Internal to data.
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include "data/data_file.hpp"
#include "data/token_source.hpp"

namespace tandem::data_files {

/// Regular files below `name` in byte order of path (links not followed), or the file itself. In a folder,
/// masks and descriptions that belong to a `.bin` are not listed. Throws InputError where something is
/// missing or may not be read.
std::vector<std::filesystem::path> files_of(const std::filesystem::path& name);

bool is_token_file(const std::filesystem::path& file);

/// Where the mask of a `.bin` lies: NAME.mask.bin beside NAME.bin.
std::filesystem::path mask_of(const std::filesystem::path& bin);
bool is_mask(const std::filesystem::path& file);

/// Contents of the JSON beside a `.bin`, as tools/prepare_data.py writes it. Every entry may be missing.
struct TokenDescription {
  std::optional<TokenWidth> width;
  TokenLayout layout = TokenLayout::stream;
  std::int64_t row_length = 0;  ///< tokens of a row; 0 for a stream
  std::int64_t vocabulary = 0;  ///< entries of the tokenizer's vocabulary; 0: unknown
  std::int64_t tokens = -1;     ///< tokens in the file; -1: unknown
};
/// Throws InputError on anything but an object whose entries make sense. `name` is for messages.
TokenDescription parse_description(std::string_view json, const std::string& name);
/// Description in the JSON beside `bin`; empty where there is none.
std::optional<TokenDescription> description_of(const std::filesystem::path& bin);

/// Where the tokens of a file begin, how wide one is, and how many there are.
struct TokenExtent {
  std::uint64_t offset = 0;
  TokenWidth width = TokenWidth::byte;
  std::int64_t count = 0;
};

/// Extent of the tokens of a `.bin`, by its llm.c header, then the description, then uint16; `forced` wins over both.
/// Throws InputError on a size, header or description that contradicts itself.
TokenExtent token_extent(const DataFile& file, std::optional<TokenWidth> forced,
                         const std::optional<TokenDescription>& description);

}  // namespace tandem::data_files
