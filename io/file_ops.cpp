#include "io/file_ops.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "core/base/direct_buffer.hpp"

namespace tandem {

namespace fs = std::filesystem;

int FileOps::create(const fs::path& file, int& fd) {
  fd = ::open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  return fd < 0 ? errno : 0;
}

int FileOps::write(int fd, const void* data, std::size_t bytes, std::size_t& written) {
  for (;;) {
    const ssize_t result = ::write(fd, data, bytes);
    if (result < 0 && errno == EINTR) continue;
    written = result < 0 ? 0 : static_cast<std::size_t>(result);
    return result < 0 ? errno : 0;
  }
}

void FileOps::start_flush(int fd) noexcept {
  // The disk works while the next bytes are made; a system that does not know the call flushes at the end.
  const int ignored = ::sync_file_range(fd, 0, 0, SYNC_FILE_RANGE_WRITE);
  static_cast<void>(ignored);
}

bool FileOps::set_direct(int fd, bool direct) noexcept { return tandem::set_direct(fd, direct); }

int FileOps::flush(int fd) { return ::fsync(fd) != 0 ? errno : 0; }
int FileOps::close(int fd) { return ::close(fd) != 0 ? errno : 0; }

int FileOps::rename(const fs::path& from, const fs::path& to) {
  std::error_code error;
  fs::rename(from, to, error);
  return error.value();
}

int FileOps::flush_directory(const fs::path& directory) {
  const int fd = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return errno;
  const int error = ::fsync(fd) != 0 ? errno : 0;
  ::close(fd);
  // Some file systems cannot flush a folder; there the rename is as durable as they make it.
  return error == EINVAL || error == ENOTSUP ? 0 : error;
}

int FileOps::make_directories(const fs::path& directory) {
  fs::path made;
  for (const fs::path& part : directory) {
    const fs::path above = made;
    made /= part;
    if (::mkdir(made.c_str(), 0755) != 0) {
      if (errno != EEXIST) return errno;
      continue;
    }
    // The new folder's name lies in the folder above, and what is saved below is lost with it.
    const int error = flush_directory(above.empty() ? "." : above);
    if (error != 0 && error != EACCES) return error;  // one that may be written to may still hide its names
  }
  std::error_code error;
  return fs::is_directory(directory, error) ? 0 : ENOTDIR;
}

int FileOps::remove_all(const fs::path& path) {
  std::error_code error;
  fs::remove_all(path, error);
  return error.value();
}

FileOps& system_files() noexcept {
  static FileOps ops;
  return ops;
}

}  // namespace tandem
