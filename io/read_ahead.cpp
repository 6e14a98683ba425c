#include "io/read_ahead.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "core/base/start_thread.hpp"
#include "io/atomic_file.hpp"
#include "io/file_ops.hpp"

namespace tandem {
namespace {

constexpr std::size_t small_piece = std::size_t{1} << 20;

bool is_large(const ReadOnlyFile& file) { return way_of_file(file.size()) == FileWay::direct; }

}  // namespace

ReadAhead::ReadAhead(const std::filesystem::path& file)
    : path_(file),
      file_(file),
      direct_(is_large(file_) && system_files().set_direct(file_.descriptor(), true)),
      piece_(is_large(file_) ? piece_bytes : small_piece) {
  for (auto& buffer : buffers_) buffer = make_direct_buffer(piece_);
  thread_ = start_thread("read ahead", [this] { loop(); });
}

ReadAhead::~ReadAhead() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

std::span<const std::byte> ReadAhead::next() {
  const std::uint64_t piece = handed_out_;
  const std::uint64_t at = piece * piece_;
  if (at >= file_.size()) return {};
  {
    std::unique_lock lock(mutex_);
    done_with_ = piece;
    changed_.notify_all();
    changed_.wait(lock, [&] { return read_ > piece || error_ != 0; });
    if (read_ <= piece) throw_unreadable(path_, error_);
  }
  ++handed_out_;
  return {buffers_[piece % buffers].get(),
          static_cast<std::size_t>(std::min<std::uint64_t>(piece_, file_.size() - at))};
}

void ReadAhead::loop() noexcept {
  std::unique_lock lock(mutex_);
  for (std::uint64_t piece = 0; piece * piece_ < file_.size() && error_ == 0; ++piece) {
    changed_.wait(lock, [&] { return stopping_ || piece < done_with_ + buffers; });
    if (stopping_) return;
    lock.unlock();
    const std::uint64_t at = piece * piece_;
    const auto bytes = static_cast<std::size_t>(std::min<std::uint64_t>(piece_, file_.size() - at));
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
    const ssize_t got = ::pread(file_.descriptor(), to + done, rest, static_cast<off_t>(at + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && !(direct_ && errno == EINVAL)) return errno;
    if (got == 0) return EIO;
    if (got > 0) done += static_cast<std::size_t>(got);
    // A file system that cannot do without its cache may say so only here; and behind a part of a block the rest
    // cannot come the direct way.
    if (direct_ && (got < 0 || done % direct_block_bytes != 0)) {
      if (!system_files().set_direct(file_.descriptor(), false)) return EINVAL;
      direct_ = false;
    }
  }
  return 0;
}

}  // namespace tandem
