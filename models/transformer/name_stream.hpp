#pragma once
// Streams of random numbers by name: which one a parameter or a layer draws from depends on its name alone.
#include <cstdint>
#include <string_view>

namespace tandem {

/// FNV-1a of the name.
constexpr std::uint64_t name_stream(std::string_view name) noexcept {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

}  // namespace tandem
