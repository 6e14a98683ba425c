#pragma once
// Sums and maxima that loops over elements take (core/host/vectorised.hpp), in an order that no instruction set
// changes.
#include <cstdint>

namespace tandem::fast {

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
