#pragma once
// Files that survive a crash whole or not at all.
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "io/file_ops.hpp"

namespace tandem {

/// How bytes get to a file: through the system's page cache, or past it from buffers of our own beside whoever
/// makes them, which takes large_file_buffers of memory and pays for large files.
enum class FileWay : std::uint8_t { cached, direct };
constexpr std::size_t large_file_buffers = std::size_t{8} << 20;  ///< bytes
/// Direct from 64 MiB on.
FileWay way_of_file(std::uint64_t bytes) noexcept;

/// Appends to a new file and hashes what it writes. Blocks. Not thread-safe.
class FileWriter {
 public:
  /// Creates or empties `file`. `ops` must outlive the writer. Throws WriteError.
  explicit FileWriter(const std::filesystem::path& file, FileOps& ops = system_files(), FileWay way = FileWay::cached);
  /// Closes; errors that matter have been thrown by `finish`.
  ~FileWriter();
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;

  /// Throws WriteError.
  void write(const void* data, std::size_t bytes);
  /// Flushes to the disk and closes. Throws WriteError.
  void finish();
  std::uint64_t bytes() const noexcept;
  /// XXH3-128 of all written, 32 hexadecimal digits.
  std::string hash() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Removes a file or folder of ours that was not finished, whatever happens.
class Unfinished {
 public:
  explicit Unfinished(std::filesystem::path path, FileOps& ops = system_files()) : path_(std::move(path)), ops_(ops) {}
  ~Unfinished() {
    if (!path_.empty()) ops_.remove_all(path_);
  }
  Unfinished(const Unfinished&) = delete;
  Unfinished& operator=(const Unfinished&) = delete;
  void keep() noexcept { path_.clear(); }

 private:
  std::filesystem::path path_;
  FileOps& ops_;
};

/// Writes beside, flushes, renames, flushes the folder. Throws WriteError and leaves the old file.
void write_file_atomically(const std::filesystem::path& file, std::string_view text, FileOps& ops = system_files());
/// Throws WriteError where it could not: for a file that long work ends in, before that work. Leaves nothing behind.
void require_writable(const std::filesystem::path& file, FileOps& ops = system_files());

/// Throws WriteError.
void create_directories_or_throw(const std::filesystem::path& directory, FileOps& ops = system_files());
/// Flushes a folder's entries to the disk. Throws WriteError.
void sync_directory(const std::filesystem::path& directory, FileOps& ops = system_files());
/// Throws WriteError.
void rename_or_throw(const std::filesystem::path& from, const std::filesystem::path& to, FileOps& ops = system_files());

}  // namespace tandem
