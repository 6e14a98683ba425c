#include "core/base/hash128.hpp"

#include <fmt/format.h>
#include <xxhash.h>
#ifdef TANDEM_XXHASH_CHOOSES
#include <xxh_x86dispatch.h>  // puts functions that look at the processor in the place of those of the same name
#endif

#include <algorithm>
#include <iterator>
#include <new>

namespace tandem {

void Hash128::Free::operator()(XXH3_state_s* state) const noexcept { XXH3_freeState(state); }

Hash128::Hash128() : state_(XXH3_createState()) {
  if (!state_) throw std::bad_alloc();
  reset();
}

void Hash128::reset() noexcept { XXH3_128bits_reset(state_.get()); }

void Hash128::add(const void* data, std::size_t bytes) noexcept { XXH3_128bits_update(state_.get(), data, bytes); }

std::array<unsigned char, 16> Hash128::bytes() const noexcept {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(state_.get()));
  std::array<unsigned char, 16> result{};
  std::copy(std::begin(canonical.digest), std::end(canonical.digest), result.begin());
  return result;
}

std::string Hash128::text() const {
  std::string text;
  for (const unsigned char byte : bytes()) text += fmt::format("{:02x}", byte);
  return text;
}

}  // namespace tandem
