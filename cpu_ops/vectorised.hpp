#pragma once
// Loops compiled once for each instruction set. The formulas of core/numerics are exact sequences of
// rounded operations, so every version of a loop gives the same bits; only sums need a fixed order,
// which `lane_sum` gives them.
#include <cstdint>

#include "core/numerics/bf16.hpp"
#include "cpu_ops/isa.hpp"

namespace tandem::fast {

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return numerics::bf16_to_float(x); }

/// Rounds to nearest even where T is bf16.
template <class T>
inline T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline bf16 from_float<bf16>(float x) {
  return numerics::round_to_bf16(x);
}

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

/// Sum of term(0) ... term(n - 1) in an order that depends on n alone: lane i % 32 takes term i, then the
/// lanes are added pairwise at distances 16 ... 1.
template <class Term>
inline float lane_sum(std::int64_t n, const Term& term) {
  constexpr int lanes = 32;
  float lane[lanes] = {};
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    for (int j = 0; j < lanes; ++j) lane[j] += term(i + j);
  }
  for (; i < n; ++i) lane[i % lanes] += term(i);
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    for (int j = 0; j < distance; ++j) lane[j] += lane[j + distance];
  }
  return lane[0];
}

/// Largest of value(0) ... value(n - 1), and `floor`.
template <class Value>
inline float lane_max(std::int64_t n, float floor, const Value& value) {
  constexpr int lanes = 32;
  float lane[lanes];
  for (int j = 0; j < lanes; ++j) lane[j] = floor;
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    for (int j = 0; j < lanes; ++j) {
      const float x = value(i + j);
      lane[j] = x > lane[j] ? x : lane[j];
    }
  }
  for (; i < n; ++i) {
    const float x = value(i);
    lane[i % lanes] = x > lane[i % lanes] ? x : lane[i % lanes];
  }
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    for (int j = 0; j < distance; ++j) lane[j] = lane[j + distance] > lane[j] ? lane[j + distance] : lane[j];
  }
  return lane[0];
}

}  // namespace tandem::fast
