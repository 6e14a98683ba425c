#pragma once
// AdamW on a run of moments in bf16, for AVX-512: updates alone and those that may be taken back run this text.
// Included behind avx512.hpp. Every array has 16 bits an element, so 32 elements are a vector, and the even and the odd
// ones of them two vectors of 32 bits: widened and narrowed by a shift or a mask each, where halves in order would have
// to be shuffled. With random bits to draw, this kernel is short of instructions, not of memory.
#include "cpu_ops/update/avx512.hpp"

namespace tandem::kernels {
namespace {

/// numerics::round_stochastically of what is not NaN, its result in the upper halves. Infinity has no bit below them,
/// so that nothing carries.
inline __m512i add_random(__m512 x, __m512i bits) { return _mm512_add_epi32(_mm512_castps_si512(x), bits); }

/// Random bits of runs one after another, from element `first` of all state on.
struct RunBits {
  RunBits(const MomentBits& of, std::uint64_t first) : bits(of), next(first) {}
  EvenOdd take() {
    next += random_run;
    return bits.draw(next - random_run);
  }
  const MomentBits& bits;
  std::uint64_t next;
};

/// The run of 32 elements from `i` on. `watcher` is told of both vectors, even elements before odd ones, and of the new
/// moments before they are stored. Returns false, with nothing stored, where an element becomes NaN.
template <class Watcher>
[[gnu::always_inline]] inline bool adamw_run(const AdamPiece& p, std::int64_t i, const Coefficients& c, RunBits& bits,
                                             Watcher& watcher) {
  static_assert(random_run == 32);
  const EvenOdd gradient = widen_both(p.gradient, i);
  const EvenOdd m = widen_both(p.state.m, i);
  const EvenOdd v = widen_both(p.state.v, i);
  const EvenOdd master = join_both(p.weight, p.state.master, i);
  const auto updated_sixteen = [&](int vector, __m512i old_master, __m512i old_m, __m512i old_v, __m512i g) {
    const Step step = step_of(floats(old_m), floats(old_v), floats(g), c);
    const __m512 next = moved(floats(old_master), step.direction, c);
    watcher.update(vector, floats(old_master), step, next);
    return Sixteen{next, step.m, step.v};
  };
  const Sixteen even = updated_sixteen(0, master.even, m.even, v.even, gradient.even);
  const Sixteen odd = updated_sixteen(1, master.odd, m.odd, v.odd, gradient.odd);
  const EvenOdd random = bits.take();  // while the divisions are under way
  if (nan_of(even, odd) != 0) [[unlikely]]
    return false;
  const __m512i low = _mm512_set1_epi32(0xffff);
  const __m512i new_m = narrow_both(
      {add_random(even.m, _mm512_and_si512(random.even, low)), add_random(odd.m, _mm512_and_si512(random.odd, low))});
  const __m512i new_v = narrow_both(
      {add_random(even.v, _mm512_srli_epi32(random.even, 16)), add_random(odd.v, _mm512_srli_epi32(random.odd, 16))});
  watcher.store_moments(i, new_m, new_v);
  _mm512_storeu_si512(element<bf16>(p.state.m, i), new_m);
  _mm512_storeu_si512(element<bf16>(p.state.v, i), new_v);
  store_masters(p, i, even.master, odd.master);
  return true;
}

}  // namespace
}  // namespace tandem::kernels
