#include "io/read_ahead.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <system_error>

#include "core/error.hpp"
#include "io/atomic_file.hpp"

namespace tandem {
namespace {

// Of memory, lengths and places in the file, where the page cache is passed by: no disk has larger blocks.
constexpr std::size_t block_bytes = 4096;
constexpr std::size_t small_piece = std::size_t{1} << 20;

[[noreturn]] void fail(const std::filesystem::path& file, int error) {
  throw InputError(fmt::format("cannot read {}", file.string()), std::generic_category().message(error));
}

int size_of(int fd, std::uint64_t& size) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) return errno;
  if (!S_ISREG(status.st_mode)) return EINVAL;
  size = static_cast<std::uint64_t>(status.st_size);
  return 0;
}

bool set_direct(int fd, bool direct) noexcept {
  const int flags = ::fcntl(fd, F_GETFL);
  return flags >= 0 && ::fcntl(fd, F_SETFL, direct ? flags | O_DIRECT : flags & ~O_DIRECT) == 0;
}

}  // namespace

ReadAhead::ReadAhead(const std::filesystem::path& file) : file_(file), fd_(::open(file.c_str(), O_RDONLY | O_CLOEXEC)) {
  if (fd_ < 0) fail(file, errno);
  try {
    if (const int error = size_of(fd_, size_); error != 0) fail(file, error);
    direct_ = way_of_file(size_) == FileWay::direct && set_direct(fd_, true);
    piece_ = way_of_file(size_) == FileWay::direct ? piece_bytes : small_piece;
    for (auto& buffer : buffers_) {
      buffer.reset(static_cast<std::byte*>(std::aligned_alloc(block_bytes, piece_)));
      if (!buffer) throw std::bad_alloc();
    }
    thread_ = std::thread([this] { loop(); });
  } catch (...) {
    ::close(fd_);
    throw;
  }
}

ReadAhead::~ReadAhead() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
  ::close(fd_);
}

std::span<const std::byte> ReadAhead::next() {
  const std::uint64_t piece = handed_out_;
  const std::uint64_t at = piece * piece_;
  if (at >= size_) return {};
  {
    std::unique_lock lock(mutex_);
    done_with_ = piece;
    changed_.notify_all();
    changed_.wait(lock, [&] { return read_ > piece || error_ != 0; });
    if (read_ <= piece) fail(file_, error_);
  }
  ++handed_out_;
  return {buffers_[piece % buffers].get(), static_cast<std::size_t>(std::min<std::uint64_t>(piece_, size_ - at))};
}

void ReadAhead::loop() noexcept {
  std::unique_lock lock(mutex_);
  for (std::uint64_t piece = 0; piece * piece_ < size_ && error_ == 0; ++piece) {
    changed_.wait(lock, [&] { return stopping_ || piece < done_with_ + buffers; });
    if (stopping_) return;
    lock.unlock();
    const std::uint64_t at = piece * piece_;
    const auto bytes = static_cast<std::size_t>(std::min<std::uint64_t>(piece_, size_ - at));
    const int error = read(buffers_[piece % buffers].get(), bytes, at);
    lock.lock();
    error_ = error;
    if (error == 0) ++read_;
    changed_.notify_all();
  }
}

/// `bytes` of them, or more where the file has grown; returns an errno, EIO where it has become shorter.
int ReadAhead::read(std::byte* to, std::size_t bytes, std::uint64_t at) {
  for (std::size_t done = 0; done < bytes;) {
    // The last bytes may be no whole block; that much is asked for all the same.
    const std::size_t rest = direct_ ? piece_ - done : bytes - done;
    const ssize_t got = ::pread(fd_, to + done, rest, static_cast<off_t>(at + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && !(direct_ && errno == EINVAL)) return errno;
    if (got == 0) return EIO;
    if (got > 0) done += static_cast<std::size_t>(got);
    // A file system that cannot do without its cache may say so only here; and behind a part of a block the rest
    // cannot come the direct way.
    if (direct_ && (got < 0 || done % block_bytes != 0)) {
      if (!set_direct(fd_, false)) return EINVAL;
      direct_ = false;
    }
  }
  return 0;
}

}  // namespace tandem
