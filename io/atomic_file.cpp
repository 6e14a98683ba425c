#include "io/atomic_file.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "core/base/error.hpp"
#include "core/base/hash128.hpp"
#include "io/write_behind.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;

// Bytes hashed and written at a time: both passes find them in the cache.
constexpr std::size_t piece_bytes = std::size_t{1} << 20;
// Bytes after which the disk is asked to begin.
constexpr std::uint64_t flush_bytes = std::uint64_t{32} << 20;

static_assert(large_file_buffers == WriteBehind::memory_bytes);

void require(const fs::path& path, int error) {
  if (error == 0) return;
  throw WriteError(fmt::format("cannot write {}", path.string()), std::generic_category().message(error),
                   "check the folder, its permissions and the free space");
}

/// Path at which a file is written before it takes its place.
fs::path beside_of(fs::path file) { return file += ".tmp"; }

}  // namespace

struct FileWriter::Impl {
  fs::path path;
  FileOps& ops;
  int fd = -1;
  std::uint64_t bytes = 0;
  std::uint64_t flushing = 0;  // bytes when the disk was last asked to begin
  Hash128 hash;
  std::unique_ptr<WriteBehind> behind;  // past the cache

  Impl(fs::path file, FileOps& o) : path(std::move(file)), ops(o) {}
  ~Impl() {
    behind.reset();
    if (fd >= 0) ops.close(fd);
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  void append(const char* data, std::size_t count) {
    hash.add(data, count);
    if (behind) {
      require(path, behind->append(data, count));
      bytes += count;
      return;
    }
    while (count > 0) {
      std::size_t written = 0;
      require(path, ops.write(fd, data, count, written));
      if (written == 0) require(path, ENOSPC);
      data += written;
      count -= written;
      bytes += written;
    }
  }
};

FileWay way_of_file(std::uint64_t bytes) noexcept {
  constexpr std::uint64_t large = std::uint64_t{64} << 20;
  return bytes >= large ? FileWay::direct : FileWay::cached;
}

FileWriter::FileWriter(const fs::path& file, FileOps& ops, FileWay way) : impl_(std::make_unique<Impl>(file, ops)) {
  require(file, ops.create(file, impl_->fd));
  if (way == FileWay::direct) impl_->behind = std::make_unique<WriteBehind>(impl_->fd, ops);
}

FileWriter::~FileWriter() = default;

void FileWriter::write(const void* data, std::size_t bytes) {
  const auto* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const std::size_t piece = std::min(bytes, piece_bytes);
    impl_->append(next, piece);
    next += piece;
    bytes -= piece;
    if (!impl_->behind && impl_->bytes - impl_->flushing >= flush_bytes) {
      impl_->ops.start_flush(impl_->fd);
      impl_->flushing = impl_->bytes;
    }
  }
}

void FileWriter::finish() {
  if (impl_->behind) require(impl_->path, impl_->behind->finish());
  impl_->behind.reset();
  require(impl_->path, impl_->ops.flush(impl_->fd));
  const int closed = impl_->ops.close(impl_->fd);
  impl_->fd = -1;
  require(impl_->path, closed);
}

std::uint64_t FileWriter::bytes() const noexcept { return impl_->bytes; }
std::string FileWriter::hash() const { return impl_->hash.text(); }

void require_writable(const fs::path& file, FileOps& ops) {
  std::error_code unknown;
  require(file, fs::is_directory(file, unknown) ? EISDIR : 0);
  const fs::path beside = beside_of(file);
  const Unfinished guard(beside, ops);
  FileWriter(beside, ops).finish();
}

void write_file_atomically(const fs::path& file, std::string_view text, FileOps& ops) {
  const fs::path beside = beside_of(file);
  Unfinished guard(beside, ops);
  {
    FileWriter writer(beside, ops);
    writer.write(text.data(), text.size());
    writer.finish();
  }
  rename_or_throw(beside, file, ops);
  guard.keep();
  sync_directory(file.has_parent_path() ? file.parent_path() : fs::path("."), ops);
}

void create_directories_or_throw(const fs::path& directory, FileOps& ops) {
  require(directory, ops.make_directories(directory));
}

void sync_directory(const fs::path& directory, FileOps& ops) { require(directory, ops.flush_directory(directory)); }

void rename_or_throw(const fs::path& from, const fs::path& to, FileOps& ops) { require(to, ops.rename(from, to)); }

}  // namespace tandem
