#include "offload/storage/state_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>

#include "core/base/direct_buffer.hpp"
#include "core/base/error.hpp"

namespace tandem {
namespace {

std::string words(int error) { return std::generic_category().message(error); }

std::string what_of(const char* what, const std::filesystem::path& folder) {
  return fmt::format("cannot {} the optimizer state in {}", what, folder.string());
}

/// A file without a name; -1 and `errno` where there can be none.
int open_nameless(const std::filesystem::path& folder) {
  const int fd = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)) return fd;
  std::string name = (folder / ".tandem-state-XXXXXX").string();  // a file system that makes none without
  const int named = ::mkostemp(name.data(), O_CLOEXEC);
  if (named >= 0) ::unlink(name.c_str());
  return named;
}

/// 0, or the error. Where blocks cannot be reserved the file is at least as long.
int reserve(int fd, std::uint64_t bytes) {
  const auto length = static_cast<off_t>(bytes);
  if (::fallocate(fd, 0, 0, length) == 0) return 0;
  if (errno != EOPNOTSUPP) return errno;
  return ::ftruncate(fd, length) == 0 ? 0 : errno;
}

/// Calls part(at, data, bytes), which moves some of them, until all have moved. 0, or the error.
template <class Data, class Part>
int move_all(std::uint64_t at, std::span<Data> bytes, const Part& part) {
  while (!bytes.empty()) {
    const ssize_t moved = part(static_cast<off_t>(at), bytes.data(), bytes.size());
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) return errno;
    if (moved == 0) return EIO;
    at += static_cast<std::uint64_t>(moved);
    bytes = bytes.subspan(static_cast<std::size_t>(moved));
  }
  return 0;
}

/// The blocks that [at, at + bytes) lies in.
struct Blocks {
  Blocks(std::uint64_t at, std::uint64_t bytes)
      : begin(at / direct_block_bytes * direct_block_bytes),
        end((at + bytes + direct_block_bytes - 1) / direct_block_bytes * direct_block_bytes) {}
  std::size_t bytes() const noexcept { return static_cast<std::size_t>(end - begin); }
  std::uint64_t begin;
  std::uint64_t end;
};

/// Calls body(at, bytes) for parts of a range, each of which lies in blocks of a buffer's size together.
template <class Data, class Body>
void for_buffers(std::uint64_t at, std::span<Data> bytes, const Body& body) {
  while (!bytes.empty()) {
    const std::size_t most = StateFile::buffer_bytes - static_cast<std::size_t>(at % direct_block_bytes);
    const std::span<Data> part = bytes.first(std::min(most, bytes.size()));
    body(at, part);
    at += part.size();
    bytes = bytes.subspan(part.size());
  }
}

}  // namespace

StateFile::StateFile(const std::filesystem::path& folder, std::uint64_t bytes) : folder_(folder) {
  fd_ = open_nameless(folder_);
  const int error = fd_ < 0 ? errno : reserve(fd_, Blocks(0, bytes).end);
  if (error != 0) {
    if (fd_ >= 0) ::close(fd_);
    throw WriteError(what_of("keep", folder_), words(error), "check the folder, its permissions and the free space");
  }
  direct_ = set_direct(fd_, true);
}

StateFile::~StateFile() { ::close(fd_); }

/// Some file systems say only now that they cannot do without their cache.
bool StateFile::without_direct(int error) {
  if (error != EINVAL || !direct_ || !set_direct(fd_, false)) return false;
  direct_ = false;
  return true;
}

void StateFile::read_blocks(std::uint64_t at, std::span<std::byte> bytes) {
  const auto part = [this](off_t from, void* data, std::size_t n) { return ::pread(fd_, data, n, from); };
  int error = move_all(at, bytes, part);
  if (without_direct(error)) error = move_all(at, bytes, part);
  if (error != 0) throw InputError(what_of("read", folder_), words(error), "look at the disk; go on from a checkpoint");
}

void StateFile::write_blocks(std::uint64_t at, std::span<const std::byte> bytes) {
  const auto part = [this](off_t to, const void* data, std::size_t n) { return ::pwrite(fd_, data, n, to); };
  int error = move_all(at, bytes, part);
  if (without_direct(error)) error = move_all(at, bytes, part);
  if (error != 0) {
    throw WriteError(what_of("write", folder_), words(error), "look at the disk; go on from a checkpoint");
  }
}

void StateFile::read(std::uint64_t at, std::span<std::byte> bytes) {
  const DirectBuffer buffer = make_direct_buffer(std::min(buffer_bytes, Blocks(at, bytes.size()).bytes()));
  for_buffers(at, bytes, [&](std::uint64_t from, std::span<std::byte> part) {
    const Blocks blocks(from, part.size());
    read_blocks(blocks.begin, {buffer.get(), blocks.bytes()});
    std::memcpy(part.data(), buffer.get() + (from - blocks.begin), part.size());
  });
}

void StateFile::write(std::uint64_t at, std::span<const std::byte> bytes) {
  const DirectBuffer buffer = make_direct_buffer(std::min(buffer_bytes, Blocks(at, bytes.size()).bytes()));
  for_buffers(at, bytes, [&](std::uint64_t to, std::span<const std::byte> part) {
    const Blocks blocks(to, part.size());
    const std::lock_guard lock(sharing_);
    // Keep the bytes of the first and the last block that are not overwritten.
    const auto keep = [&](std::uint64_t block) {
      read_blocks(block, {buffer.get() + (block - blocks.begin), direct_block_bytes});
    };
    if (to != blocks.begin) keep(blocks.begin);
    if (to + part.size() != blocks.end) keep(blocks.end - direct_block_bytes);
    std::memcpy(buffer.get() + (to - blocks.begin), part.data(), part.size());
    write_blocks(blocks.begin, {buffer.get(), blocks.bytes()});
  });
}

}  // namespace tandem
