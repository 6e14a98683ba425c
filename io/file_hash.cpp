#include "io/file_hash.hpp"

#include <fmt/format.h>
#include <xxhash.h>

#include <new>

#include "io/read_ahead.hpp"

namespace tandem {

void FileHash::Free::operator()(XXH3_state_s* state) const noexcept { XXH3_freeState(state); }

FileHash::FileHash() : state_(XXH3_createState()) {
  if (!state_) throw std::bad_alloc();
  XXH3_128bits_reset(state_.get());
}

void FileHash::add(const void* data, std::size_t bytes) noexcept { XXH3_128bits_update(state_.get(), data, bytes); }

std::string FileHash::text() const {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(state_.get()));
  std::string text;
  for (const unsigned char byte : canonical.digest) text += fmt::format("{:02x}", byte);
  return text;
}

std::string file_hash(const std::filesystem::path& file) {
  ReadAhead bytes(file);
  FileHash hash;
  for (auto piece = bytes.next(); !piece.empty(); piece = bytes.next()) hash.add(piece.data(), piece.size());
  return hash.text();
}

}  // namespace tandem
