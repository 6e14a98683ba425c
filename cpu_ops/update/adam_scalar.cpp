#include <algorithm>

#include "core/numerics/norm_block.hpp"
#include "cpu_ops/update/adam_kernels.hpp"

namespace tandem::kernels {

void adamw_between(std::int64_t begin, std::int64_t end, const AdamPiece& p, const AdamCoefficients& c) {
  with_format(p.format, [&]<StateFormat format>(Format<format>) { numerics::update_range<format>(p, begin, end, c); });
}

void adamw_scalar(const AdamPiece& piece, const AdamCoefficients& c) { adamw_between(0, piece.count, piece, c); }

std::int64_t unaligned_head(const AdamPiece& piece) {
  if (piece.format != StateFormat::bf16_moments) return 0;
  const auto past = static_cast<std::int64_t>(piece.index % static_cast<std::uint64_t>(random_run));
  return past == 0 ? 0 : std::min(piece.count, random_run - past);
}

RandomRounds::RandomRounds(const AdamCoefficients& c, std::uint64_t first) : step(c.step), upper_word(first >> 32) {
  auto word0 = static_cast<std::uint32_t>(c.seed);
  auto word1 = static_cast<std::uint32_t>(c.seed >> 32);
  for (RoundKey& k : key) {
    k = {word0, word1};
    word0 += numerics::philox_weyl0;
    word1 += numerics::philox_weyl1;
  }
  const auto lower = [](std::uint64_t x) { return x & 0xffffffffu; };
  const auto exchanged = [](std::uint64_t x) { return x << 32 | x >> 32; };
  const std::uint64_t first01 = exchanged(numerics::philox_multiplier1 * lower(c.step)) ^ upper_word ^ key[0].word0;
  first23 = c.step >> 32 ^ key[0].word1;
  second01 = first01 >> 32 ^ key[1].word0;
  second23 = exchanged(numerics::philox_multiplier0 * lower(first01)) ^ key[1].word1;
}

double fold_norm_lanes(double* lane, const bf16* gradient, std::int64_t begin, std::int64_t count) {
  for (std::int64_t i = begin; i < count; ++i) {
    const double g = static_cast<double>(numerics::bf16_to_float(gradient[i]));
    lane[i - begin] += g * g;
  }
  for (int distance = numerics::norm_lanes / 2; distance > 0; distance /= 2) {
    for (int j = 0; j < distance; ++j) lane[j] += lane[j + distance];
  }
  return lane[0];
}

}  // namespace tandem::kernels
