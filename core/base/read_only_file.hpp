#pragma once
// A file that is open for reading.
#include <cstdint>
#include <filesystem>

namespace tandem {

/// Throws InputError that names the file, for the error number (errno) of a call on it.
[[noreturn]] void throw_unreadable(const std::filesystem::path& file, int error);

/// Owner of the descriptor of a regular file.
class ReadOnlyFile {
 public:
  /// Throws InputError that names the file where it is missing, unreadable or not a regular file.
  explicit ReadOnlyFile(const std::filesystem::path& file);

  int descriptor() const noexcept { return opened_.fd; }
  /// Bytes, when it was opened.
  std::uint64_t size() const noexcept { return size_; }

 private:
  struct Opened {
    explicit Opened(const std::filesystem::path& file);
    ~Opened();
    Opened(const Opened&) = delete;
    Opened& operator=(const Opened&) = delete;
    const int fd;
  };
  Opened opened_;
  std::uint64_t size_ = 0;
};

}  // namespace tandem
