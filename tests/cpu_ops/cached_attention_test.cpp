// Attention over a cache and products of few rows against their references; a token alone has its bits among others.
#include <algorithm>
#include <array>

#include "cpu_ops/kernels/kernels.hpp"
#include "cpu_ops/reference/reference.hpp"
#include "tests/cpu_ops/cached_tokens.hpp"
#include "tests/cpu_ops/op_testing.hpp"

namespace tandem::testing {
namespace {

class CachedAttention : public ::testing::TestWithParam<DType> {};

HeadsView heads(const TensorView& x) { return {x.data, x.dtype, x.shape[1]}; }

Tensor attend(Parallel& threads, const CacheProblem& p) {
  LentWorkspace workspace(fast::cached_attention_scratch(p.shape.head_dim, threads.threads()));
  Tensor out(p.q.dtype(), p.out_shape());
  fast::cached_attention(threads, workspace.get(), heads(p.q), p.cache(), p.places.tokens(), out, p.shape);
  return out;
}

TEST_P(CachedAttention, IsTheReference) {
  for (const AttentionShape& shape : cached_shapes()) {
    const CacheProblem p(GetParam(), shape);
    Tensor expected(GetParam(), p.out_shape());
    reference::cached_attention(heads(p.q), p.cache(), p.places.tokens(), expected, p.shape);
    for (const auto& arena : arenas()) EXPECT_CLOSE(attend(*arena, p), expected);
  }
}

TEST_P(CachedAttention, ATokenAloneHasItsBits) {
  for (const AttentionShape& shape : cached_shapes()) {
    const CacheProblem all(GetParam(), shape);
    const Tensor among_others = attend(*arenas()[1], all);
    for (std::int64_t n = 0; n < shape.sequence; ++n) {
      const CacheProblem alone = all.only(n);
      EXPECT_SAME_ROW(attend(*arenas()[0], alone), 0, among_others, n);
    }
  }
}

TEST_P(CachedAttention, StoresKeysAndValuesAtTheirPlacesAlone) {
  CacheProblem p(GetParam(), cached_shapes().front());
  Random random(5);
  const std::int64_t width = p.shape.kv_heads * p.shape.head_dim;
  const Tensor k = random.tensor(GetParam(), {p.shape.sequence, width});
  const Tensor v = random.tensor(GetParam(), {p.shape.sequence, width});
  const Tensor keys_before = p.keys;
  fast::store_keys_values(heads(k), heads(v), p.cache(), p.places.tokens(), p.shape);
  Tensor expected = keys_before;
  for (std::int64_t n = 0; n < p.shape.sequence; ++n) {
    const std::int64_t place =
        p.places.rows[static_cast<std::size_t>(n)] * p.capacity() + p.places.tokens().position(n);
    for (std::int64_t i = 0; i < width; ++i) expected.set(place * width + i, static_cast<float>(k.get(n * width + i)));
    EXPECT_SAME_ROW(p.values, place, v, n);
  }
  EXPECT_SAME_BITS(p.keys, expected);
}

class LinearRows : public ::testing::TestWithParam<DType> {};

TEST_P(LinearRows, IsTheReferenceAndARowAloneHasItsBits) {
  for (const auto& [rows, in, out] : {std::array<std::int64_t, 3>{1, 1, 1},
                                      {1, 64, 100},
                                      {3, 55, 22},
                                      {4, 131, 33},
                                      {9, 200, 65},
                                      {5, 31, 1},
                                      {1, 32, 7}}) {
    for (const bool biased : {false, true}) {
      Random random(7);
      const Tensor x = random.tensor(GetParam(), {rows, in}), w = random.tensor(DType::bf16, {out, in});
      const Tensor b = random.tensor(DType::bf16, {out});
      const TensorView bias = biased ? b.view() : TensorView{};
      Tensor expected(GetParam(), {rows, out}), all = expected;
      reference::linear(x, w, bias, expected);
      fast::linear_rows(*arenas()[1], x, w, bias, all);
      EXPECT_CLOSE(all, expected);
      for (std::int64_t r = 0; r < rows; ++r) {
        Tensor alone(GetParam(), {1, out});
        fast::linear_rows(*arenas()[0], x.view().rows(r, r + 1), w, bias, alone);
        EXPECT_SAME_ROW(alone, 0, all, r);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Activations, CachedAttention, ::testing::Values(DType::f32, DType::bf16), dtype_name);
INSTANTIATE_TEST_SUITE_P(Activations, LinearRows, ::testing::Values(DType::f32, DType::bf16), dtype_name);

}  // namespace
}  // namespace tandem::testing
