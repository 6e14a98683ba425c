#pragma once
// AdamW on a run of moments in bf16, for AVX2: updates alone and those that may be taken back run this text. Included
// behind avx2.hpp.
#include "cpu_ops/update/avx2.hpp"

namespace tandem::kernels {
namespace {

/// numerics::round_stochastically of what is not NaN, its result in the upper halves. Infinity has no bit below them,
/// so that nothing carries.
inline __m256i add_random(__m256 x, __m256i bits) { return _mm256_add_epi32(_mm256_castps_si256(x), bits); }

/// Random bits of runs one after another, from element `first` of all state on. Those of a run are drawn while the one
/// before is updated.
struct RunBits {
  RunBits(const MomentBits& of, std::uint64_t first) : bits(of), next(first), drawn(of.begin_bits(first)) {
    bits.advance(drawn, MomentBits::begun, MomentBits::rounds);
  }
  /// Bits of the run that comes; begins to draw those of the one behind it.
  MomentBits::Blocks take() {
    const MomentBits::Blocks own = drawn;
    next += random_run;
    drawn = bits.begin_bits(next);
    return own;
  }
  void advance(int round, int end) { bits.advance(drawn, round, end); }
  const MomentBits& bits;
  std::uint64_t next;
  MomentBits::Blocks drawn;
};

/// Sixteen elements.
struct Updated {
  Eight even, odd;
};
/// Updates sixteen elements, of which vector `vector` is the first. Goes on with drawing random bits meanwhile, by two
/// rounds from `round` on.
template <class Watcher>
[[gnu::always_inline]] inline Updated adamw_sixteen(const AdamPiece& p, std::int64_t i, const Coefficients& c,
                                                    RunBits& bits, int round, int vector, Watcher& watcher) {
  const EvenOdd gradient = widen_both(p.gradient, i), master = join_both(p.weight, p.state.master, i);
  const EvenOdd m = widen_both(p.state.m, i), v = widen_both(p.state.v, i);
  const auto updated_eight = [&](int of, __m256i old_master, __m256i old_m, __m256i old_v, __m256i g) {
    const Step step = step_of(floats(old_m), floats(old_v), floats(g), c);
    const __m256 next = moved(floats(old_master), step.direction, c);
    watcher.update(of, floats(old_master), step, next);
    return Eight{next, step.m, step.v};
  };
  Updated u;
  u.even = updated_eight(vector, master.even, m.even, v.even, gradient.even);
  bits.advance(round, round + 1);
  u.odd = updated_eight(vector + 1, master.odd, m.odd, v.odd, gradient.odd);
  bits.advance(round + 1, round + 2);
  return u;
}
template <class Watcher>
[[gnu::always_inline]] inline void store_rounded(const AdamPiece& p, std::int64_t i, const Updated& u,
                                                 const RandomState& random, Watcher& watcher) {
  const __m256i low = all(0xffff);
  const __m256i m = narrow_both({add_random(u.even.m, _mm256_and_si256(random.even, low)),
                                 add_random(u.odd.m, _mm256_and_si256(random.odd, low))});
  const __m256i v = narrow_both({add_random(u.even.v, _mm256_srli_epi32(random.even, 16)),
                                 add_random(u.odd.v, _mm256_srli_epi32(random.odd, 16))});
  watcher.store_moments(i, m, v);
  store_halves(p.state.m, i, m);
  store_halves(p.state.v, i, v);
  store_masters(p, i, u.even.master, u.odd.master);
}

/// The run of 32 elements from `i` on. `watcher` is told of each of four vectors, even elements of sixteen before odd
/// ones, and of sixteen new moments before they are stored. Returns false, with nothing stored, where an element
/// becomes NaN.
template <class Watcher>
[[gnu::always_inline]] inline bool adamw_run(const AdamPiece& p, std::int64_t i, const Coefficients& c, RunBits& bits,
                                             Watcher& watcher) {
  static_assert(random_run == 32);
  const MomentBits::Blocks own = bits.take();
  static_assert(MomentBits::begun + 5 == MomentBits::rounds);
  const Updated low = adamw_sixteen(p, i, c, bits, MomentBits::begun, 0, watcher);
  const Updated high = adamw_sixteen(p, i + 16, c, bits, MomentBits::begun + 2, 2, watcher);
  bits.advance(MomentBits::rounds - 1, MomentBits::rounds);
  if (_mm256_movemask_ps(_mm256_or_ps(nan_of(low.even, low.odd), nan_of(high.even, high.odd))) != 0) [[unlikely]]
    return false;
  store_rounded(p, i, low, own.low, watcher);
  store_rounded(p, i + 16, high, own.high, watcher);
  return true;
}

}  // namespace
}  // namespace tandem::kernels
