#pragma once
// Kinds of files that are neither text nor token files, told by their first bytes and by their names. Internal to data.
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string_view>

namespace tandem::data_files {

/// A kind of file that is not data as it stands.
struct FileKind {
  std::string_view name;    ///< with its article: "a gzip file"
  std::string_view advice;  ///< action for the user
};

/// Bytes that `kind_of_content` wants to see, where the file has so many.
constexpr std::size_t kind_bytes = 512;

/// Kind of a file that begins with `first`, of `size` bytes in all; empty where it is none that is known. A short
/// beginning, which text may have by chance, is none.
std::optional<FileKind> kind_of_content(std::span<const std::byte> first, std::uint64_t size);

/// Kind of a file by the ending of its name, in upper or lower case: records (JSON lines, Parquet, ...) and archives.
std::optional<FileKind> kind_of_name(const std::filesystem::path& file);

/// Whether its name ends in `.json`, in upper or lower case.
bool is_json(const std::filesystem::path& file);
/// Whether the text of a `.json` file begins as records do: a list of objects, or an object on each of several lines.
/// `first`: as many bytes as the first record may have.
bool begins_as_records(std::string_view first);

/// Whether the file has the byte-order mark of UTF-8, three bytes that are no text.
bool has_utf8_mark(std::span<const std::byte> first);
constexpr std::uint64_t utf8_mark_bytes = 3;

}  // namespace tandem::data_files
