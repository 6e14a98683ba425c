#pragma once
// Writes large files past the page cache, beside whoever makes their bytes. Internal to io.
#include <array>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <thread>

#include "core/base/direct_buffer.hpp"
#include "io/file_ops.hpp"

namespace tandem {

/// Appends to an open file from two buffers: one is filled while a thread writes the other. Bytes go straight to the
/// disk where the file system can do that: a checkpoint as large as the memory must not push anything else out of
/// it, and the system's own copy of it would take as long as the disk. Functions return 0 or an errno, and once one
/// has failed, so do all later ones. Driven by one thread.
class WriteBehind {
 public:
  static constexpr std::size_t piece_bytes = std::size_t{4} << 20;
  /// Host memory that one takes.
  static constexpr std::size_t memory_bytes = 2 * piece_bytes;

  /// `fd` must be empty; it and `ops` must outlive this. Throws std::bad_alloc and std::system_error.
  WriteBehind(int fd, FileOps& ops);
  /// Waits for a write under way; what has not been written is dropped.
  ~WriteBehind();
  WriteBehind(const WriteBehind&) = delete;
  WriteBehind& operator=(const WriteBehind&) = delete;

  /// Takes the bytes; blocks while both buffers are full.
  int append(const void* data, std::size_t bytes);
  /// Returns when everything has been given to the system.
  int finish();

 private:
  void loop();
  int write(const std::byte* data, std::size_t bytes);
  int wait_written(std::unique_lock<std::mutex>& lock);
  int hand_over();

  const int fd_;
  FileOps& ops_;
  bool direct_ = false;  ///< past the page cache: whole blocks only
  std::array<DirectBuffer, 2> buffers_;
  std::size_t filling_ = 0;  ///< index of the buffer that is being filled
  std::size_t filled_ = 0;   ///< bytes in it

  std::mutex mutex_;
  std::condition_variable changed_;
  const std::byte* handed_ = nullptr;  ///< a full buffer that is to be written; null: none
  int error_ = 0;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace tandem
