#pragma once
// Tokens of several sequences over a cache, for tests of attention that decodes.
#include <cstdint>
#include <vector>

#include "core/ops/ops.hpp"
#include "tests/cpu_ops/op_testing.hpp"

namespace tandem::testing {

/// Rows and positions of N tokens, on the host.
struct CachedPlaces {
  std::vector<std::int32_t> rows, first;

  explicit CachedPlaces(const std::vector<std::pair<std::int32_t, std::int32_t>>& row_and_position) {
    for (const auto& [row, position] : row_and_position) {
      first.push_back(static_cast<std::int32_t>(rows.size()) - position);
      rows.push_back(row);
    }
  }
  CachedTokens tokens() const { return {rows.data(), {first.data(), first.data()}}; }
};

/// Shapes of N tokens: heads of odd and even dimensions that share keys or do not, windows shorter than a sequence, of
/// one token and longer than any.
inline std::vector<AttentionShape> cached_shapes() {
  return {{1, 7, 3, 1, 5, 0.4F},      {1, 7, 4, 2, 64, 0.125F},      {1, 7, 2, 2, 80, 0.1F, 37},
          {1, 7, 4, 1, 128, 0.1F, 1}, {1, 7, 2, 1, 24, -0.2F, 1000}, {1, 1, 2, 1, 256, 0.06F, 64}};
}

/// A random cache of three sequences of at most 150 positions, and a query for each token: of the same sequence and of
/// others, the first position and the last.
struct CacheProblem {
  static constexpr std::int64_t sequences = 3, length = 150;

  CacheProblem(DType dtype, const AttentionShape& s)
      : CacheProblem(dtype, s, Random(17), {{2, 0}, {0, 149}, {0, 63}, {1, 64}, {1, 65}, {2, 130}, {0, 5}}) {}
  /// One of the tokens, without the others.
  CacheProblem only(std::int64_t n) const {
    CacheProblem one = *this;
    one.shape.sequence = 1;
    one.q = Tensor(q.dtype(), {1, q.view().shape[1]});
    for (std::int64_t i = 0; i < one.q.count(); ++i) {
      one.q.set(i, static_cast<float>(q.get(n * one.q.count() + i)));
    }
    const auto at = static_cast<std::size_t>(n);
    one.places = CachedPlaces({{places.rows[at], static_cast<std::int32_t>(places.tokens().position(n))}});
    return one;
  }
  KeyValueCache cache() const { return {keys, values}; }
  std::int64_t capacity() const { return length; }
  Shape out_shape() const { return {shape.sequence, shape.heads * shape.head_dim}; }

  AttentionShape shape;
  CachedPlaces places;
  Tensor q;             ///< (N, H D)
  Tensor keys, values;  ///< (B, S, K D)

 private:
  CacheProblem(DType dtype, const AttentionShape& s, Random random,
               std::vector<std::pair<std::int32_t, std::int32_t>> all)
      : shape(s),
        places({all.begin(), all.begin() + s.sequence}),
        q(random.tensor(dtype, {s.sequence, s.heads * s.head_dim})),
        keys(random.tensor(dtype, {sequences, length, s.kv_heads * s.head_dim})),
        values(random.tensor(dtype, {sequences, length, s.kv_heads * s.head_dim})) {}
};

/// Row i of a tensor, its outermost dimensions taken together.
inline std::vector<double> row_of(const TensorView& view, std::int64_t i) {
  const std::int64_t width = view.shape[view.shape.rank() - 1];
  std::vector<double> values;
  for (std::int64_t c = i * width; c < (i + 1) * width; ++c) {
    values.push_back(view.dtype == DType::bf16 ? static_cast<double>(numerics::bf16_to_float(view.as<bf16>()[c]))
                                               : static_cast<double>(view.as<float>()[c]));
  }
  return values;
}

#define EXPECT_SAME_ROW(actual, i, expected, j) \
  EXPECT_EQ(::tandem::testing::row_of(actual, i), ::tandem::testing::row_of(expected, j)) << #actual

}  // namespace tandem::testing
