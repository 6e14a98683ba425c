#include "io/write_behind.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/base/start_thread.hpp"

namespace tandem {

static_assert(WriteBehind::piece_bytes % direct_block_bytes == 0);

WriteBehind::WriteBehind(int fd, FileOps& ops) : fd_(fd), ops_(ops), direct_(ops.set_direct(fd, true)) {
  for (auto& buffer : buffers_) buffer = make_direct_buffer(piece_bytes);
  thread_ = start_thread("write behind", [this] { loop(); });
}

WriteBehind::~WriteBehind() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

int WriteBehind::append(const void* data, std::size_t bytes) {
  const auto* next = static_cast<const std::byte*>(data);
  while (bytes > 0) {
    const std::size_t part = std::min(bytes, piece_bytes - filled_);
    std::memcpy(buffers_[filling_].get() + filled_, next, part);
    filled_ += part;
    next += part;
    bytes -= part;
    if (filled_ < piece_bytes) continue;
    if (const int error = hand_over(); error != 0) return error;
  }
  return 0;
}

int WriteBehind::finish() {
  {
    std::unique_lock lock(mutex_);
    if (const int error = wait_written(lock); error != 0) return error;
  }
  // The thread has nothing to do: the last bytes, which may be no whole block, are this one's.
  if (direct_ && filled_ > 0) direct_ = !ops_.set_direct(fd_, false);
  return write(buffers_[filling_].get(), std::exchange(filled_, 0));
}

int WriteBehind::wait_written(std::unique_lock<std::mutex>& lock) {
  changed_.wait(lock, [this] { return handed_ == nullptr; });
  return error_;
}

/// The full buffer to the thread, once it is done with the other one.
int WriteBehind::hand_over() {
  {
    std::unique_lock lock(mutex_);
    if (const int error = wait_written(lock); error != 0) return error;
    handed_ = buffers_[filling_].get();
  }
  changed_.notify_all();
  filling_ = 1 - filling_;
  filled_ = 0;
  return 0;
}

void WriteBehind::loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || handed_ != nullptr; });
    if (handed_ == nullptr) return;
    lock.unlock();
    const int error = write(handed_, piece_bytes);
    if (error == 0 && !direct_) ops_.start_flush(fd_);
    lock.lock();
    if (error_ == 0) error_ = error;
    handed_ = nullptr;
    changed_.notify_all();
  }
}

int WriteBehind::write(const std::byte* data, std::size_t bytes) {
  while (bytes > 0) {
    std::size_t written = 0;
    const int error = ops_.write(fd_, data, bytes, written);
    // A file system that cannot do without its cache may say so only here.
    if (error == EINVAL && direct_ && ops_.set_direct(fd_, false)) {
      direct_ = false;
      continue;
    }
    if (error != 0) return error;
    if (written == 0) return ENOSPC;
    data += written;
    bytes -= written;
    // Behind a part of a block the rest cannot go the direct way.
    if (direct_ && written % direct_block_bytes != 0) direct_ = !ops_.set_direct(fd_, false);
  }
  return 0;
}

}  // namespace tandem
