#include <immintrin.h>

#include <array>

#include "core/numerics/weight_codes.hpp"
#include "core/tensor/coded_shape.hpp"
#include "cpu_ops/kernels/elements.hpp"
#include "cpu_ops/kernels/kernels.hpp"

namespace tandem::fast {
namespace {

/// Elements that a thread takes at once: whole blocks of NF4, and pairs of its codes.
constexpr std::int64_t at_once = 16 * 1024;

/// Numbers of the codes of one block of NF4, as weights.
struct BlockTable {
  alignas(32) std::uint16_t bits[numerics::nf4_codes];
};

/// 64 elements by lookups of bytes: the lower and the upper half of each weight.
[[gnu::target("avx2")]] void look_up_block(const std::byte* codes, const BlockTable& table, bf16* to) {
  const __m256i low_bytes = _mm256_set1_epi16(0xff);
  const __m256i all = _mm256_load_si256(reinterpret_cast<const __m256i*>(table.bits));
  // Packing puts the halves of both lanes side by side: eight and eight of each kind.
  const __m256i halves = _mm256_permute4x64_epi64(
      _mm256_packus_epi16(_mm256_and_si256(all, low_bytes), _mm256_srli_epi16(all, 8)), 0b11'01'10'00);
  const __m256i lower = _mm256_permute2x128_si256(halves, halves, 0x00);
  const __m256i upper = _mm256_permute2x128_si256(halves, halves, 0x11);
  const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
  const __m256i nibble = _mm256_set1_epi8(0x0f);
  const __m256i even = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble), odd = _mm256_and_si256(both, nibble);
  const __m256i even_lower = _mm256_shuffle_epi8(lower, even), even_upper = _mm256_shuffle_epi8(upper, even);
  const __m256i odd_lower = _mm256_shuffle_epi8(lower, odd), odd_upper = _mm256_shuffle_epi8(upper, odd);
  const __m256i even_first = _mm256_unpacklo_epi8(even_lower, even_upper);
  const __m256i odd_first = _mm256_unpacklo_epi8(odd_lower, odd_upper);
  const __m256i even_last = _mm256_unpackhi_epi8(even_lower, even_upper);
  const __m256i odd_last = _mm256_unpackhi_epi8(odd_lower, odd_upper);
  // Each holds eight elements of either half of the block.
  const __m256i parts[] = {_mm256_unpacklo_epi16(even_first, odd_first), _mm256_unpackhi_epi16(even_first, odd_first),
                           _mm256_unpacklo_epi16(even_last, odd_last), _mm256_unpackhi_epi16(even_last, odd_last)};
  auto* const out = reinterpret_cast<__m256i*>(to);
  _mm256_storeu_si256(out, _mm256_permute2x128_si256(parts[0], parts[1], 0x20));
  _mm256_storeu_si256(out + 1, _mm256_permute2x128_si256(parts[2], parts[3], 0x20));
  _mm256_storeu_si256(out + 2, _mm256_permute2x128_si256(parts[0], parts[1], 0x31));
  _mm256_storeu_si256(out + 3, _mm256_permute2x128_si256(parts[2], parts[3], 0x31));
}

/// Relative scales of all bytes.
const std::array<float, 256>& scales_of_bytes() {
  static const std::array<float, 256> all = [] {
    std::array<float, 256> scales{};
    for (std::uint32_t byte = 0; byte < scales.size(); ++byte) scales[byte] = numerics::scale_of_byte(byte);
    return scales;
  }();
  return all;
}

/// Elements [begin, end), block by block: of each the weights of all codes, and then a lookup an element.
void decode_nf4(const CodedWeight& from, const CodedShape& shape, std::int64_t begin, std::int64_t end, bf16* to) {
  const numerics::Nf4Scales blocks = numerics::nf4_scales(from.code, shape, from.scales);
  const std::array<float, 256>& of_byte = scales_of_bytes();
  const bool by_vectors = best_isa() != Isa::scalar;
  for (std::int64_t i = begin; i < end;) {
    const numerics::ScaleRun run = numerics::scale_run(from.code, shape, i);
    const std::int64_t last = std::min(run.end, end);
    const float absmax = blocks.floats != nullptr
                             ? blocks.floats[run.scale]
                             : numerics::absmax_of_byte(blocks, run.scale, of_byte[blocks.bytes[run.scale]]);
    BlockTable table;
    for (std::uint32_t c = 0; c < numerics::nf4_codes; ++c) {
      table.bits[c] = numerics::round_to_bf16(numerics::nf4_value(c, absmax)).bits;
    }
    if (by_vectors && last - i == nf4_block && i % 2 == 0) {
      look_up_block(from.codes + i / 2, table, to + i);
    } else {
      for (std::int64_t j = i; j < last; ++j) to[j].bits = table.bits[numerics::nf4_code_at(from.codes, j)];
    }
    i = last;
  }
}

/// Elements [begin, end) of codes of a byte, run by run of those that share a scale.
template <class Value>
void decode_bytes(const CodedWeight& from, const CodedShape& shape, std::int64_t begin, std::int64_t end, bf16* to,
                  const Value& value) {
  for (std::int64_t i = begin; i < end;) {
    const numerics::ScaleRun run = numerics::scale_run(from.code, shape, i);
    const std::int64_t last = std::min(run.end, end);
    const float scale = from.scales[run.scale];
    const std::byte* const codes = from.codes;
#pragma GCC ivdep
    for (std::int64_t j = i; j < last; ++j) to[j] = numerics::round_to_bf16(value(codes[j], scale));
    i = last;
  }
}

}  // namespace

void decode(Parallel& parallel, const CodedWeight& from, TensorView weight) {
  const CodedShape shape = coded_shape(weight.shape);
  bf16* const to = weight.as<bf16>();
  for_ranges(parallel, shape.count(), at_once, [=](std::int64_t begin, std::int64_t length) {
    vectorised([=] {
      const std::int64_t end = begin + length;
      if (from.code == WeightCode::int8) {
        decode_bytes(from, shape, begin, end, to, [](std::byte code, float scale) {
          return numerics::int8_value(static_cast<std::int8_t>(code), scale);
        });
      } else if (from.code == WeightCode::fp8) {
        decode_bytes(from, shape, begin, end, to, [](std::byte code, float scale) {
          return numerics::fp8_value(static_cast<std::uint32_t>(code), scale);
        });
      } else {
        decode_nf4(from, shape, begin, end, to);
      }
    });
  });
}

}  // namespace tandem::fast
