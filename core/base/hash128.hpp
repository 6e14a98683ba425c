#pragma once
// XXH3-128, the hash of files in manifests and of state.
#include <array>
#include <cstddef>
#include <memory>
#include <string>

struct XXH3_state_s;  // the state of the xxHash library

namespace tandem {

/// Hash of bytes in the order in which they are added. Uses the library's fastest code for this processor, where it can
/// choose; the hash is the same on all.
class Hash128 {
 public:
  /// Throws std::bad_alloc.
  Hash128();

  void reset() noexcept;
  void add(const void* data, std::size_t bytes) noexcept;
  /// Hash of all bytes added so far, the most significant byte first.
  std::array<unsigned char, 16> bytes() const noexcept;
  /// `bytes()` as 32 hexadecimal digits.
  std::string text() const;

 private:
  struct Free {
    void operator()(XXH3_state_s* state) const noexcept;
  };
  std::unique_ptr<XXH3_state_s, Free> state_;
};

}  // namespace tandem
