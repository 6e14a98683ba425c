// Attention over a cache and products of few rows by GPU kernels against their references; a token alone has its bits
// among others.
#include <array>

#include "cpu_ops/reference/reference.hpp"
#include "tests/cpu_ops/cached_tokens.hpp"
#include "tests/gpu_ops/kernels/bench.hpp"

namespace tandem::testing {
namespace {

HeadsView heads_of(const TensorView& x) { return {x.data, x.dtype, x.shape[1]}; }

/// i32 values on the device.
Operand put(const std::vector<std::int32_t>& values) {
  Tensor tensor(DType::i32, {static_cast<std::int64_t>(values.size())});
  std::copy(values.begin(), values.end(), tensor.view().as<std::int32_t>());
  return bench().put(tensor);
}

class CachedOps : public OpsTest {
 protected:
  Tensor attend(const CacheProblem& p, std::size_t offset = 0) {
    const Operand q = bench().put(p.q, offset), keys = bench().put(p.keys), values = bench().put(p.values);
    const Operand rows = put(p.places.rows), first = put(p.places.first);
    const Operand out = bench().put(Tensor(dtype(), p.out_shape()), offset);
    const CachedTokens tokens{rows.as<std::int32_t>(), {first.as<std::int32_t>(), first.as<std::int32_t>()}};
    ops().cached_attention(heads_of(q), {keys, values}, tokens, out, p.shape, stream());
    return bench().get(out);
  }
};

TEST_P(CachedOps, AttentionIsTheReference) {
  for (const AttentionShape& shape : cached_shapes()) {
    const CacheProblem p(dtype(), shape);
    Tensor expected(dtype(), p.out_shape());
    reference::cached_attention(heads_of(p.q), p.cache(), p.places.tokens(), expected, p.shape);
    for (const std::size_t offset : offsets(dtype())) {
      const auto results = under_all_schedules([&] { return std::vector<Tensor>{attend(p, offset)}; });
      EXPECT_WITHIN(results[0], expected, dtype(), false);
    }
  }
}

TEST_P(CachedOps, ATokenAloneHasItsBits) {
  const CacheProblem all(dtype(), cached_shapes()[1]);
  const Tensor among_others = attend(all);
  for (std::int64_t n = 0; n < all.shape.sequence; ++n) EXPECT_SAME_ROW(attend(all.only(n)), 0, among_others, n);
}

TEST_P(CachedOps, KeysAndValuesAreStoredAtTheirPlacesAlone) {
  for (const AttentionShape& shape : cached_shapes()) {
    const CacheProblem p(dtype(), shape);
    Random random(5);
    const std::int64_t width = shape.kv_heads * shape.head_dim;
    const Tensor k = random.tensor(dtype(), {shape.sequence, width}),
                 v = random.tensor(dtype(), {shape.sequence, width});
    Tensor keys_expected = p.keys, values_expected = p.values;
    for (std::int64_t n = 0; n < shape.sequence; ++n) {
      const auto row = static_cast<std::int64_t>(p.places.rows[static_cast<std::size_t>(n)]);
      const std::int64_t place = row * p.capacity() + p.places.tokens().position(n);
      for (std::int64_t i = 0; i < width; ++i) {
        keys_expected.set(place * width + i, static_cast<float>(k.get(n * width + i)));
        values_expected.set(place * width + i, static_cast<float>(v.get(n * width + i)));
      }
    }
    for (const std::size_t offset : offsets(dtype())) {
      const Operand keys = bench().put(p.keys), values = bench().put(p.values);
      const Operand in_k = bench().put(k, offset), in_v = bench().put(v, offset);
      const Operand rows = put(p.places.rows), first = put(p.places.first);
      const CachedTokens tokens{rows.as<std::int32_t>(), {first.as<std::int32_t>(), first.as<std::int32_t>()}};
      ops().store_keys_values(heads_of(in_k), heads_of(in_v), {keys, values}, tokens, shape, stream());
      EXPECT_SAME_BITS(bench().get(keys), keys_expected);
      EXPECT_SAME_BITS(bench().get(values), values_expected);
    }
  }
}

TEST_P(CachedOps, LinearRowsIsTheReferenceAndARowAloneHasItsBits) {
  for (const auto& [rows, in, out] :
       {std::array<std::int64_t, 3>{1, 1, 1}, {1, 64, 100}, {3, 55, 22}, {4, 131, 33}, {9, 520, 5}, {5, 31, 1}}) {
    for (const bool biased : {false, true}) {
      Random random(7);
      const Tensor x = random.tensor(dtype(), {rows, in}), w = random.tensor(DType::bf16, {out, in});
      const Tensor b = random.tensor(DType::bf16, {out});
      Tensor expected(dtype(), {rows, out});
      reference::linear(x, w, biased ? b.view() : TensorView{}, expected);
      const auto product = [&, out = out](const Tensor& of, std::int64_t count, std::size_t offset) {
        const Operand given = bench().put(of, offset), weight = bench().put(w), bias = bench().put(b);
        const Operand y = bench().put(Tensor(dtype(), {count, out}));
        ops().linear_rows(given, weight, biased ? bias.view() : TensorView{}, y, stream());
        return bench().get(y);
      };
      for (const std::size_t offset : offsets(dtype())) {
        const auto results =
            under_all_schedules([&, rows = rows] { return std::vector<Tensor>{product(x, rows, offset)}; });
        EXPECT_WITHIN(results[0], expected, dtype(), false);
        Tensor last(dtype(), {1, in});
        for (std::int64_t i = 0; i < in; ++i) last.set(i, static_cast<float>(x.get((rows - 1) * in + i)));
        EXPECT_SAME_ROW(product(last, 1, offset), 0, results[0], rows - 1);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Activations, CachedOps, ::testing::Values(DType::f32, DType::bf16), dtype_name);

}  // namespace
}  // namespace tandem::testing
