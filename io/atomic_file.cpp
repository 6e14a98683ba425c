#include "io/atomic_file.hpp"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <system_error>

#include "core/error.hpp"
#include "core/mapped_file.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;

// Bytes hashed and written at a time: both passes find them in the cache.
constexpr std::size_t piece_bytes = std::size_t{1} << 20;
// Bytes after which the disk is asked to begin.
constexpr std::uint64_t flush_bytes = std::uint64_t{32} << 20;

void require(const fs::path& path, int error) {
  if (error == 0) return;
  throw WriteError(fmt::format("cannot write {}", path.string()), std::generic_category().message(error),
                   "check the folder, its permissions and the free space");
}

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
  FileOps& ops;
  int fd = -1;
  std::uint64_t bytes = 0;
  std::uint64_t flushing = 0;  // bytes when the disk was last asked to begin
  XXH3_state_t* hash = nullptr;

  void append(const char* data, std::size_t count) {
    XXH3_128bits_update(hash, data, count);
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

FileWriter::FileWriter(const fs::path& file, FileOps& ops) : impl_(new Impl{file, ops}) {
  impl_->hash = XXH3_createState();
  if (impl_->hash == nullptr) throw std::bad_alloc();
  XXH3_128bits_reset(impl_->hash);
  const int error = ops.create(file, impl_->fd);
  if (error != 0) XXH3_freeState(impl_->hash);
  require(file, error);
}

FileWriter::~FileWriter() {
  if (impl_->fd >= 0) impl_->ops.close(impl_->fd);
  XXH3_freeState(impl_->hash);
}

void FileWriter::write(const void* data, std::size_t bytes) {
  const auto* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const std::size_t piece = std::min(bytes, piece_bytes);
    impl_->append(next, piece);
    next += piece;
    bytes -= piece;
    if (impl_->bytes - impl_->flushing >= flush_bytes) {
      impl_->ops.start_flush(impl_->fd);
      impl_->flushing = impl_->bytes;
    }
  }
}

void FileWriter::finish() {
  require(impl_->path, impl_->ops.flush(impl_->fd));
  const int closed = impl_->ops.close(impl_->fd);
  impl_->fd = -1;
  require(impl_->path, closed);
}

std::uint64_t FileWriter::bytes() const noexcept { return impl_->bytes; }
std::string FileWriter::hash() const { return hex(XXH3_128bits_digest(impl_->hash)); }

std::string file_hash(const fs::path& file) {
  const MappedFile mapped(file);
  return hex(XXH3_128bits(mapped.bytes().data(), mapped.bytes().size()));
}

void write_file_atomically(const fs::path& file, std::string_view text, FileOps& ops) {
  fs::path beside = file;
  beside += ".tmp";
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
