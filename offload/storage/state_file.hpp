#pragma once
// A file for optimizer state that memory has no room for.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <mutex>
#include <span>

namespace tandem {

/// Has no name, so that it is gone with its owner, however that ends. Past the page cache where the file system can do
/// that: state is used once a step, and would push everything else out. Any number of threads may use it, on ranges
/// that do not overlap. All calls block.
class StateFile {
 public:
  /// Host memory that a call for a range of any bytes takes at most.
  static constexpr std::size_t buffer_bytes = std::size_t{1} << 20;

  /// Reserves `bytes` of zeros, and what is left of the last block, on the disk of `folder`. Throws WriteError.
  StateFile(const std::filesystem::path& folder, std::uint64_t bytes);
  ~StateFile();
  StateFile(const StateFile&) = delete;
  StateFile& operator=(const StateFile&) = delete;

  /// Reads whole blocks: place, memory and number of bytes are multiples of direct_block_bytes. Throws InputError.
  void read_blocks(std::uint64_t at, std::span<std::byte> bytes);
  /// Writes whole blocks. Throws WriteError.
  void write_blocks(std::uint64_t at, std::span<const std::byte> bytes);
  /// Reads any range, through a buffer. Throws InputError.
  void read(std::uint64_t at, std::span<std::byte> bytes);
  /// Writes any range, through a buffer; blocks that it shares with others' ranges keep what those have written. Throws
  /// WriteError, InputError.
  void write(std::uint64_t at, std::span<const std::byte> bytes);

  /// Whether the file bypasses the page cache.
  bool direct() const noexcept { return direct_; }

 private:
  bool without_direct(int error);

  std::filesystem::path folder_;
  int fd_ = -1;
  std::atomic<bool> direct_ = false;
  std::mutex sharing_;  ///< held by who reads blocks to write them back changed
};

}  // namespace tandem
