#pragma once
// Random numbers as a function of key and counter: no state, so that element i of an array is the same
// whoever draws it, in whatever order. Philox4x32 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3",
// SC 2011).
#include <cstdint>

#include "core/numerics/host_device.hpp"

namespace tandem::numerics {

/// 128 random bits, or a counter.
struct Philox128 {
  std::uint32_t word[4];
};

constexpr std::uint32_t philox_multiplier0 = 0xD2511F53u;
constexpr std::uint32_t philox_multiplier1 = 0xCD9E8D57u;
constexpr std::uint32_t philox_weyl0 = 0x9E3779B9u;  // the key advances by golden ratio and sqrt(3) - 1
constexpr std::uint32_t philox_weyl1 = 0xBB67AE85u;
/// The authors' choice, with a margin, and the fewest rounds that pass all tests of BigCrush (their table 2).
constexpr int philox_rounds = 10;
constexpr int philox_fewest_rounds = 7;

/// The block of random bits at `counter` of the sequence `key`.
template <int rounds = philox_rounds>
TANDEM_HD Philox128 philox(Philox128 counter, std::uint64_t key) {
  std::uint32_t key0 = static_cast<std::uint32_t>(key);
  std::uint32_t key1 = static_cast<std::uint32_t>(key >> 32);
  Philox128 c = counter;
  for (int round = 0; round < rounds; ++round) {
    const std::uint64_t product0 = std::uint64_t{philox_multiplier0} * c.word[0];
    const std::uint64_t product1 = std::uint64_t{philox_multiplier1} * c.word[2];
    c = Philox128{{static_cast<std::uint32_t>(product1 >> 32) ^ c.word[1] ^ key0, static_cast<std::uint32_t>(product1),
                   static_cast<std::uint32_t>(product0 >> 32) ^ c.word[3] ^ key1,
                   static_cast<std::uint32_t>(product0)}};
    key0 += philox_weyl0;
    key1 += philox_weyl1;
  }
  return c;
}

/// Block `index` of the stream `stream` under `seed`.
template <int rounds = philox_rounds>
TANDEM_HD Philox128 philox_block(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  return philox<rounds>(Philox128{{static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(index >> 32),
                           static_cast<std::uint32_t>(stream), static_cast<std::uint32_t>(stream >> 32)}},
                seed);
}

/// Uniform in (0, 1], 53 bits, from words `first` and `first + 1`: never 0, so that its logarithm is finite.
TANDEM_HD double uniform_of(const Philox128& bits, int first) {
  const std::uint64_t both = (static_cast<std::uint64_t>(bits.word[first]) << 32) | bits.word[first + 1];
  constexpr double scale = 1.0 / 9007199254740992.0;  // 2^-53
  return (static_cast<double>(both >> 11) + 1.0) * scale;
}

}  // namespace tandem::numerics
