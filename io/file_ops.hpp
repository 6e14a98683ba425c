#pragma once
// Calls of the system that files need, one function each, so that a test can fail, shorten or cut off any of them.
#include <cstddef>
#include <filesystem>

namespace tandem {

/// The system's own calls. Every function returns 0, or the number of the error (errno). Thread-safe.
class FileOps {
 public:
  FileOps() = default;
  virtual ~FileOps() = default;
  FileOps(const FileOps&) = delete;
  FileOps& operator=(const FileOps&) = delete;

  /// Creates or empties a file for writing, readable by all and writable by its owner.
  virtual int create(const std::filesystem::path& file, int& fd);
  /// Appends; `written` may come out smaller than `bytes`.
  virtual int write(int fd, const void* data, std::size_t bytes, std::size_t& written);
  /// Asks for what was written so far to go to the disk soon, without waiting for it: a hint.
  virtual void start_flush(int fd) noexcept;
  /// Whether what is written from now on goes to the disk past the page cache: in whole blocks, from aligned memory
  /// and to aligned places. Returns whether the system does as asked.
  virtual bool set_direct(int fd, bool direct) noexcept;
  /// Returns when the file's bytes are on the disk.
  virtual int flush(int fd);
  virtual int close(int fd);
  virtual int rename(const std::filesystem::path& from, const std::filesystem::path& to);
  /// Returns when the folder's entries are on the disk, or as near to it as the file system gets.
  virtual int flush_directory(const std::filesystem::path& directory);
  /// The folder and those above it; one that exists is no error.
  virtual int make_directories(const std::filesystem::path& directory);
  /// A file or folder with all below it; one that is missing is no error.
  virtual int remove_all(const std::filesystem::path& path);
};

FileOps& system_files() noexcept;

}  // namespace tandem
