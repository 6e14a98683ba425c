#pragma once
// A whole file, readable as memory, without being read in: pages come and go as the system likes, so that
// its size is no part of a host memory budget.
#include <cstddef>
#include <filesystem>
#include <span>

namespace tandem {

/// Owner of a read-only mapping. Move-only. The file should not shrink while it is mapped.
class MappedFile {
 public:
  MappedFile() = default;
  /// Throws InputError that names the file where it is missing, unreadable or not a regular file.
  explicit MappedFile(const std::filesystem::path& file);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  std::span<const std::byte> bytes() const noexcept { return {data_, size_}; }
  const std::filesystem::path& path() const noexcept { return path_; }

 private:
  void unmap() noexcept;
  std::filesystem::path path_;
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace tandem
