#pragma once
// A file of data, open for the whole run. Internal to data.
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>

#include "core/base/read_only_file.hpp"

namespace tandem {

/// Read rather than mapped: touching a mapping of a file that has become shorter ends the process without a word.
/// Move-only; reading is thread-safe.
class DataFile {
 public:
  /// Throws InputError that names the file where it is missing, unreadable or not a regular file. Raises the process's
  /// limit of open files as far as it may: data may lie in thousands of them.
  explicit DataFile(const std::filesystem::path& file);

  const std::filesystem::path& path() const noexcept { return path_; }
  /// Bytes, when it was opened.
  std::uint64_t size() const noexcept { return file_->size(); }
  /// Fills `to` with the bytes from `offset` on, which must lie within `size`. Throws InputError where they are not to
  /// be had any more.
  void read(std::uint64_t offset, std::span<std::byte> to) const;

 private:
  std::filesystem::path path_;
  std::unique_ptr<const ReadOnlyFile> file_;
};

}  // namespace tandem
