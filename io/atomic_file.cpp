#include "io/atomic_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>
#include <xxhash.h>

#include <cerrno>
#include <new>
#include <system_error>

#include "core/error.hpp"
#include "core/mapped_file.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const fs::path& path, const std::error_code& error) {
  throw WriteError(fmt::format("cannot write {}", path.string()), error.message(),
                   "check the folder, its permissions and the free space");
}
[[noreturn]] void fail(const fs::path& path, int error) { fail(path, std::error_code(error, std::generic_category())); }

std::string hex(XXH128_hash_t hash) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, hash);
  std::string text;
  for (const unsigned char byte : canonical.digest) text += fmt::format("{:02x}", byte);
  return text;
}

}  // namespace

struct FileWriter::Impl {
  fs::path path;
  int fd = -1;
  std::uint64_t bytes = 0;
  XXH3_state_t* hash = nullptr;
};

FileWriter::FileWriter(const fs::path& file) : impl_(std::make_unique<Impl>()) {
  impl_->path = file;
  impl_->fd = ::open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (impl_->fd < 0) fail(file, errno);
  impl_->hash = XXH3_createState();
  if (impl_->hash == nullptr) {
    ::close(impl_->fd);
    throw std::bad_alloc();
  }
  XXH3_128bits_reset(impl_->hash);
}

FileWriter::~FileWriter() {
  if (impl_->fd >= 0) ::close(impl_->fd);
  XXH3_freeState(impl_->hash);
}

void FileWriter::write(const void* data, std::size_t bytes) {
  const auto* next = static_cast<const char*>(data);
  XXH3_128bits_update(impl_->hash, data, bytes);
  impl_->bytes += bytes;
  while (bytes > 0) {
    const ssize_t written = ::write(impl_->fd, next, bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail(impl_->path, errno);
    next += written;
    bytes -= static_cast<std::size_t>(written);
  }
}

void FileWriter::finish() {
  if (::fsync(impl_->fd) != 0) fail(impl_->path, errno);
  const int closed = ::close(impl_->fd);
  impl_->fd = -1;
  if (closed != 0) fail(impl_->path, errno);
}

std::uint64_t FileWriter::bytes() const noexcept { return impl_->bytes; }
std::string FileWriter::hash() const { return hex(XXH3_128bits_digest(impl_->hash)); }

std::string file_hash(const fs::path& file) {
  const MappedFile mapped(file);
  return hex(XXH3_128bits(mapped.bytes().data(), mapped.bytes().size()));
}

void write_file_atomically(const fs::path& file, std::string_view text) {
  fs::path beside = file;
  beside += ".tmp";
  {
    FileWriter writer(beside);
    writer.write(text.data(), text.size());
    writer.finish();
  }
  rename_or_throw(beside, file);
  sync_directory(file.has_parent_path() ? file.parent_path() : fs::path("."));
}

void create_directories_or_throw(const fs::path& directory) {
  std::error_code error;
  fs::create_directories(directory, error);
  if (error) fail(directory, error);
  if (!fs::is_directory(directory, error)) fail(directory, ENOTDIR);
}

void sync_directory(const fs::path& directory) {
  const int fd = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) fail(directory, errno);
  const int result = ::fsync(fd);
  const int error = errno;
  ::close(fd);
  // Some file systems cannot flush a folder; there the rename is as durable as they make it.
  if (result != 0 && error != EINVAL && error != ENOTSUP) fail(directory, error);
}

void rename_or_throw(const fs::path& from, const fs::path& to) {
  std::error_code error;
  fs::rename(from, to, error);
  if (error) fail(to, error);
}

}  // namespace tandem
