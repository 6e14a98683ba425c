#pragma once
// Reads large files past the page cache, ahead of whoever uses their bytes. Internal to io.
#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <mutex>
#include <span>
#include <thread>

#include "core/base/direct_buffer.hpp"
#include "core/base/read_only_file.hpp"

namespace tandem {

/// A file's bytes from the first to the last. A thread reads them ahead; large files come straight from the disk where
/// the file system can do that: a checkpoint as large as the memory must not push anything else out of it, and growing
/// the system's own copy would take as long as the disk. Driven by one thread.
class ReadAhead {
 public:
  static constexpr int buffers = 3;
  /// Bytes handed out at a time, of large files.
  static constexpr std::size_t piece_bytes = std::size_t{4} << 20;
  /// Host memory that one takes at most.
  static constexpr std::size_t memory_bytes = buffers * piece_bytes;

  /// Throws InputError that names the file, std::bad_alloc and std::system_error.
  explicit ReadAhead(const std::filesystem::path& file);
  ~ReadAhead();
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  /// The next bytes, at an address that is a multiple of 4096, until the next call; all of them pieces of one size but
  /// the last; none at the end. Blocks. Throws InputError where the disk fails, or the file has become shorter.
  std::span<const std::byte> next();

 private:
  void loop() noexcept;
  int read(std::byte* to, std::size_t bytes, std::uint64_t at);

  const std::filesystem::path path_;
  const ReadOnlyFile file_;
  bool direct_;  ///< past the page cache: whole blocks only
  const std::size_t piece_;
  std::array<DirectBuffer, buffers> buffers_;
  std::uint64_t handed_out_ = 0;  ///< pieces, the one in use included

  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t done_with_ = 0;  ///< pieces whose buffers may be read into again
  std::uint64_t read_ = 0;       ///< pieces
  int error_ = 0;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace tandem
