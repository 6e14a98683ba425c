#include <immintrin.h>

#include <array>
#include <bit>
#include <cstring>

#include "cpu_ops/update/undo_entries.hpp"

// From here on only: inline functions of the headers above stay compiled for any processor.
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi2,avx2,popcnt"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi2,avx2,popcnt")
// GCC 12 warns about the deliberately undefined operands inside its own intrinsics.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

namespace tandem::kernels {
namespace {

/// Whether an element may be 255 or more behind the one before, or the first of the block: then three groups between
/// them, one after another, have lost none.
bool may_be_far(const OldMoment& old) {
  const __m512i low = _mm512_load_si512(old.lost), high = _mm512_load_si512(old.lost + 8);
  const std::uint32_t none = _mm512_testn_epi64_mask(low, low) | std::uint32_t{_mm512_testn_epi64_mask(high, high)}
                                                                     << 8;
  return (none & none >> 1 & none >> 2) != 0;
}

/// Lost elements of a block, one after another. Vectors are written and read whole.
template <class Word>
struct LostElements {
  static constexpr int slack = 64;
  /// Indices modulo 256; before the first is that of an element before the block.
  std::uint8_t* indices() { return index + slack; }
  alignas(64) std::uint8_t index[slack + layout_quantum + slack];
  alignas(64) Word words[layout_quantum + slack];
  std::int64_t count = 0;  // behind the arrays: before them it made updates with their records 2% slower
};
constexpr auto first_indices = [] {
  std::array<std::uint8_t, undo_group> indices{};
  for (std::size_t i = 0; i < indices.size(); ++i) indices[i] = static_cast<std::uint8_t>(i);
  return indices;
}();

/// Old bits of lost elements.
void take_words(const OldMoment& old, LostElements<std::uint8_t>& lost) {
  std::uint8_t* end = lost.words;
  for (std::int64_t g = 0; g < undo_groups; ++g) {
    const __m512i words = _mm512_load_si512(old.words<std::uint8_t>() + g * undo_group);
    _mm512_storeu_si512(end, _mm512_maskz_compress_epi8(old.lost[g], words));
    end += std::popcount(old.lost[g]);
  }
}
void take_words(const OldMoment& old, LostElements<std::uint16_t>& lost) {
  constexpr std::int64_t at_once = 32;
  std::uint16_t* end = lost.words;
  for (std::int64_t i = 0; i < layout_quantum; i += at_once) {
    const auto mask = static_cast<std::uint32_t>(old.lost[i / undo_group] >> i % undo_group);
    const __m512i words = _mm512_load_si512(old.words<std::uint16_t>() + i);
    _mm512_storeu_si512(end, _mm512_maskz_compress_epi16(mask, words));
    end += std::popcount(mask);
  }
}
void take_indices(const OldMoment& old, std::uint8_t* indices, std::int64_t& count) {
  __m512i index = _mm512_loadu_si512(first_indices.data());
  indices[-1] = 0xff;
  for (std::int64_t g = 0; g < undo_groups; ++g) {
    _mm512_storeu_si512(indices + count, _mm512_maskz_compress_epi8(old.lost[g], index));
    count += std::popcount(old.lost[g]);
    index = _mm512_add_epi8(index, _mm512_set1_epi8(undo_group));
  }
}

/// Widened to 16 bits each.
__m512i halves_at(const std::uint8_t* p) {
  return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
/// Widened to 32 bits each.
__m512i words_at(const std::uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
/// `a` where `mask` has ones, else `b`.
__m512i where(__m512i mask, __m512i a, __m512i b) { return _mm512_ternarylogic_epi32(a, b, mask, 0xe4); }

/// Writes entries of 32 elements; `index`: that of the first.
void put_vector(std::byte* to, const std::uint8_t* index, const std::uint8_t* words) {
  const __m512i distance =
      _mm512_sub_epi16(_mm512_sub_epi16(halves_at(index), halves_at(index - 1)), _mm512_set1_epi16(1));
  const __m512i shifted = _mm512_slli_epi16(halves_at(words), 8);
  _mm512_storeu_si512(to, where(_mm512_set1_epi16(0xff), distance, shifted));
}
/// Writes entries of 16 elements.
void put_vector(std::byte* to, const std::uint8_t* index, const std::uint16_t* words) {
  const __m512i distance =
      _mm512_sub_epi32(_mm512_sub_epi32(words_at(index), words_at(index - 1)), _mm512_set1_epi32(1));
  const __m512i word = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(words)));
  const __m512i entry = where(_mm512_set1_epi32(0xff), distance, _mm512_slli_epi32(word, 8));
  const __m512i three_bytes = _mm512_set4_epi32(static_cast<int>(0x80808080), 0x0e0d0c0a, 0x09080605, 0x04020100);
  const __m512i three_words = _mm512_setr_epi32(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(to, _mm512_permutexvar_epi32(three_words, _mm512_shuffle_epi8(entry, three_bytes)));
}
/// All entries. Returns their end.
template <class Word>
std::byte* put_all(std::byte* to, LostElements<Word>& lost) {
  constexpr std::int64_t word_bytes = sizeof(Word), at_once = 32 / word_bytes, bytes = 1 + word_bytes;
  for (std::int64_t k = 0; k < lost.count; k += at_once) put_vector(to + k * bytes, lost.indices() + k, lost.words + k);
  return to + lost.count * bytes;
}

}  // namespace

template <class Word>
Written put_near_entries_avx512(std::byte* to, const OldMoment& old) {
  if (may_be_far(old)) return {};
  LostElements<Word> lost;
  take_indices(old, lost.indices(), lost.count);
  take_words(old, lost);
  return {put_all(to, lost), lost.count};
}
template Written put_near_entries_avx512<std::uint8_t>(std::byte*, const OldMoment&);
template Written put_near_entries_avx512<std::uint16_t>(std::byte*, const OldMoment&);

}  // namespace tandem::kernels

#ifdef __clang__
#pragma clang attribute pop
#endif
