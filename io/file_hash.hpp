#pragma once
// XXH3-128 of files, as manifests have it. Internal to io.
#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>

struct XXH3_state_s;  // of xxHash

namespace tandem {

/// Of bytes as they come.
class FileHash {
 public:
  /// Throws std::bad_alloc.
  FileHash();

  void add(const void* data, std::size_t bytes) noexcept;
  /// Of all that was added so far: 32 hexadecimal digits.
  std::string text() const;

 private:
  struct Free {
    void operator()(XXH3_state_s* state) const noexcept;
  };
  std::unique_ptr<XXH3_state_s, Free> state_;
};

/// Of a file's bytes. Throws InputError.
std::string file_hash(const std::filesystem::path& file);

}  // namespace tandem
