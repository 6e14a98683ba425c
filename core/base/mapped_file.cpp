#include "core/base/mapped_file.hpp"

#include <sys/mman.h>

#include <cerrno>
#include <utility>

#include "core/base/read_only_file.hpp"

namespace tandem {
MappedFile::MappedFile(const std::filesystem::path& file) : path_(file) {
  const ReadOnlyFile opened(file);
  size_ = static_cast<std::size_t>(opened.size());
  if (size_ == 0) return;  // an empty mapping is refused by the system
  void* address = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, opened.descriptor(), 0);
  if (address == MAP_FAILED) throw_unreadable(file, errno);
  data_ = static_cast<const std::byte*>(address);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  if (this != &other) {
    unmap();
    path_ = std::move(other.path_);
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
  }
  return *this;
}

MappedFile::~MappedFile() { unmap(); }

void MappedFile::unmap() noexcept {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
  data_ = nullptr;
}

}  // namespace tandem
