#include "io/file_hash.hpp"

#include "core/base/hash128.hpp"
#include "io/read_ahead.hpp"

namespace tandem {

std::string file_hash(const std::filesystem::path& file) {
  ReadAhead bytes(file);
  Hash128 hash;
  for (auto piece = bytes.next(); !piece.empty(); piece = bytes.next()) hash.add(piece.data(), piece.size());
  return hash.text();
}

}  // namespace tandem
