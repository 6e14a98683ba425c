#pragma once
// Place and width of the tokens of a file, as the file's own header or an index beside it says. Internal
// to data.
#include <cstdint>
#include <filesystem>
#include <optional>

#include "data/data_file.hpp"
#include "data/token_source.hpp"

namespace tandem::data_files {

struct TokenExtent {
  std::uint64_t offset = 0;  ///< bytes, of the first token
  TokenWidth width = TokenWidth::byte;
  std::int64_t count = 0;
  bool bare = false;  ///< neither a header nor an index nor a description says what they are
};

/// Extent of the tokens of a `.bin` with a header of llm.c, which `forced` wins over; empty where it has none. Throws
/// InputError on a header that contradicts the file's size.
std::optional<TokenExtent> extent_of_llmc(const DataFile& file, std::optional<TokenWidth> forced);

/// Whether the content is a NumPy array, whatever the file is called.
bool is_numpy(const DataFile& file);
/// Extent of the tokens of a NumPy array: one dimension of integers of 2, 4 or 8 bytes, little endian. Throws
/// InputError on any other, and where the file is no NumPy array.
TokenExtent extent_of_numpy(const DataFile& file);

/// Path that the index of a `.bin` would have: NAME.idx beside NAME.bin.
std::filesystem::path index_of(const std::filesystem::path& bin);
/// Width of the tokens of a `.bin` with an index beside it, as Megatron writes both; empty where there is none. Throws
/// InputError on an index of another format or of another file, or of tokens that are no unsigned numbers.
std::optional<TokenWidth> width_of_index(const DataFile& bin);

/// Reading of a file as uint16 tokens, of which nothing says that they are.
struct NarrowReading {
  bool every_second_is_zero = false;    ///< so it is as good as uint32
  bool three_of_four_are_zero = false;  ///< so it is as good as 64-bit
};
/// Reads to the first token that decides. A file of zeros alone decides nothing.
NarrowReading read_as_uint16(const DataFile& file);
/// Whether every second 32-bit word is 0, as in 64-bit ids.
bool looks_like_64_bit(const DataFile& file, const TokenExtent& extent);

}  // namespace tandem::data_files
