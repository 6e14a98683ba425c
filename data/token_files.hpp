#pragma once
// Files that the user's names stand for, and the layout of the tokens in them. Internal to data.
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data/data_file.hpp"
#include "data/token_headers.hpp"
#include "data/token_source.hpp"

namespace tandem::data_files {

/// Files that a name stands for.
struct FoundFiles {
  std::vector<std::filesystem::path> files;
  bool in_folder = false;  ///< the name is that of a folder
  // Left out of a folder:
  std::int64_t hidden = 0;  ///< files and folders whose names begin with a dot, each folder counted once
  std::int64_t links = 0;
};

/// Regular files below `name` in byte order of path (links not followed, hidden ones left out), or the file itself. In
/// a folder, masks, descriptions, indices and scores that belong to token files are not listed. Throws InputError where
/// something is missing or may not be read, and where a folder has nothing to list.
FoundFiles files_of(const std::filesystem::path& name);

/// Whether its name ends in `.bin` or `.npy`.
bool is_token_file(const std::filesystem::path& file);

/// Mask of a `.bin`: NAME.mask.bin beside NAME.bin.
std::filesystem::path mask_of(const std::filesystem::path& bin);
bool is_mask(const std::filesystem::path& file);

/// Contents of the JSON beside a `.bin`, as tools/prepare_data.py writes it. Every entry may be missing.
struct TokenDescription {
  std::optional<TokenWidth> width;
  TokenLayout layout = TokenLayout::stream;
  std::int64_t row_length = 0;  ///< tokens of a row; 0 for a stream
  std::int64_t end_token = -1;  ///< id of the token that ends a document; -1: unknown
  std::int64_t records = -1;    ///< documents or other records in the file; -1: unknown
  std::int64_t vocabulary = 0;  ///< entries of the tokenizer's vocabulary; 0: unknown
  std::int64_t tokens = -1;     ///< tokens in the file; -1: unknown
  bool pairs = false;           ///< rows 2 i and 2 i + 1 are answers to one prompt, the preferred one first
};
/// Throws InputError on anything but an object whose entries make sense. `name` is for messages.
TokenDescription parse_description(std::string_view json, const std::string& name);
/// Description in the JSON beside `bin`; empty where there is none.
std::optional<TokenDescription> description_of(const std::filesystem::path& bin);
/// Path that the description of a `.bin` would have: NAME.json beside NAME.bin.
std::filesystem::path description_path(const std::filesystem::path& bin);
/// Name of a file beside a `.bin` that tools/prepare_data.py writes together with NAME.json, so that this one should be
/// there too; empty where there is none.
std::string tool_file_beside(const std::filesystem::path& bin);

/// Extent of the tokens of a file, by its header (llm.c, NumPy), else the description, else the index beside it, else
/// uint16, where the vocabulary has room in that and the content cannot be wider ids; `forced` wins over all but a
/// NumPy header. Throws InputError on a size, header, description or index that contradicts itself, on a width that
/// nothing states, and on files of another kind. `notices`: what is doubtful, in words.
TokenExtent token_extent(const DataFile& file, std::optional<TokenWidth> forced,
                         const std::optional<TokenDescription>& description, std::int64_t vocabulary,
                         std::vector<std::string>& notices);

/// Throws InputError where a file that would be read as text is of a kind that is no text, by its name (`in_folder`: it
/// was found there) or its first bytes. Returns the bytes of its byte-order mark, which are no text either.
std::uint64_t require_text(const DataFile& file, bool in_folder);

}  // namespace tandem::data_files
