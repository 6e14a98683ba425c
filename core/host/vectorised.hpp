#pragma once
// Loops compiled once for each instruction set. The formulas of core/numerics are exact sequences of rounded
// operations, so every version of a loop gives the same bits.
#include "core/host/isa.hpp"

namespace tandem {

namespace detail {
// g++ would use half of a vector; clang uses it all, and does not know this word.
#pragma GCC push_options
#pragma GCC target("prefer-vector-width=512")
template <class Loop>
[[gnu::target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,bmi,bmi2"), gnu::flatten, gnu::noinline]] void run_avx512(
    const Loop& loop) {
  loop();
}
#pragma GCC pop_options
template <class Loop>
[[gnu::target("avx2,fma,bmi,bmi2"), gnu::flatten, gnu::noinline]] void run_avx2(const Loop& loop) {
  loop();
}
}  // namespace detail

/// Calls `loop()` compiled for `isa`. Capture by value: a captured reference may alias the arrays, and
/// hinders the compiler. Loops that work in place say `#pragma GCC ivdep`.
template <class Loop>
void vectorised(const Loop& loop, Isa isa = best_isa()) {
  switch (isa) {
    case Isa::avx512:
      detail::run_avx512(loop);
      break;
    case Isa::avx2:
      detail::run_avx2(loop);
      break;
    case Isa::scalar:
      loop();
      break;
  }
}

}  // namespace tandem
