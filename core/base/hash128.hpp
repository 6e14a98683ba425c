#pragma once
// XXH3-128: of files in manifests, and of state.
#include <array>
#include <cstddef>
#include <memory>
#include <string>

struct XXH3_state_s;  // of xxHash

namespace tandem {

/// Of bytes as they come. The library's fastest way on this processor, where it can choose; the same hash on all.
class Hash128 {
 public:
  /// Throws std::bad_alloc.
  Hash128();

  void reset() noexcept;
  void add(const void* data, std::size_t bytes) noexcept;
  /// Of all that was added so far, the most significant byte first.
  std::array<unsigned char, 16> bytes() const noexcept;
  /// The same as 32 hexadecimal digits.
  std::string text() const;

 private:
  struct Free {
    void operator()(XXH3_state_s* state) const noexcept;
  };
  std::unique_ptr<XXH3_state_s, Free> state_;
};

}  // namespace tandem
