#include <cstring>

#include "cpu_ops/reference/reference.hpp"
#include "tests/gpu_ops/kernels/bench.hpp"

namespace tandem::testing {
namespace {

// (B, T, heads, kv heads, head dim): odd, grouped, several tiles with a short last one, a single token, and each size
// of tile.
const AttentionShape all_shapes[] = {{3, 37, 3, 1, 5, 0.4F},     {1, 1, 1, 1, 16, 0.25F},  {2, 64, 4, 2, 16, 0.25F},
                                     {1, 131, 4, 2, 64, 0.125F}, {1, 50, 2, 1, 80, 0.11F}, {1, 33, 1, 1, 128, 0.1F},
                                     {1, 150, 2, 1, 128, 0.1F},  {1, 97, 1, 1, 24, 0.2F},  {1, 35, 2, 1, 200, 0.07F},
                                     {1, 32, 1, 1, 256, 0.06F}};

/// Rows of q, k and v side by side, (H + 2 K) D elements.
std::int64_t packed_width(const AttentionShape& s) { return (s.heads + 2 * s.kv_heads) * s.head_dim; }

struct Packed {
  HeadsView q, k, v;
};
Packed packed(const AttentionShape& s, const TensorView& buffer) {
  const auto part = [&](std::int64_t first_head) {
    return HeadsView{static_cast<std::byte*>(buffer.data) +
                         static_cast<std::size_t>(first_head * s.head_dim) * size_of(buffer.dtype),
                     buffer.dtype, packed_width(s)};
  };
  return {part(0), part(s.heads), part(s.heads + s.kv_heads)};
}

Shape packed_shape(const AttentionShape& s) { return {s.batch, s.sequence, packed_width(s)}; }
Shape out_shape(const AttentionShape& s) { return {s.batch, s.sequence, s.heads * s.head_dim}; }
Shape lse_shape(const AttentionShape& s) { return {s.batch, s.heads, s.sequence}; }

class AttentionOps : public OpsTest {
 protected:
  void lend(const AttentionShape& s) {
    bench().lend({.tokens = s.batch * s.sequence,
                  .sequence = s.sequence,
                  .heads = s.heads,
                  .kv_heads = s.kv_heads,
                  .head_dim = s.head_dim,
                  .activations = dtype()});
  }
};

TEST_P(AttentionOps, ForwardAndBackwardAreTheReference) {
  for (const AttentionShape& s : all_shapes) {
    SCOPED_TRACE(std::to_string(s.sequence) + " tokens, dim " + std::to_string(s.head_dim));
    lend(s);
    Random random(7);
    const Tensor in = random.tensor(dtype(), packed_shape(s)), dout = random.tensor(dtype(), out_shape(s));
    Tensor out(dtype(), out_shape(s)), lse(DType::f32, lse_shape(s)), d(dtype(), packed_shape(s));
    const Packed p = packed(s, in), dp = packed(s, d);
    reference::attention(p.q, p.k, p.v, out, lse, s);
    reference::attention_backward(dout, p.q, p.k, p.v, out, lse, dp.q, dp.k, dp.v, s);
    const auto results = under_all_schedules([&] {
      const Operand buffer = bench().put(in), dbuffer = bench().put(Tensor(dtype(), packed_shape(s)));
      const Operand o = bench().put(Tensor(dtype(), out_shape(s))), l = bench().put(Tensor(DType::f32, lse_shape(s)));
      const Operand without = bench().put(Tensor(dtype(), out_shape(s))), gradient = bench().put(dout);
      const Operand out_given = bench().put(out), lse_given = bench().put(lse);
      const Packed x = packed(s, buffer), dx = packed(s, dbuffer);
      ops().attention(x.q, x.k, x.v, o, l, s, stream());
      ops().attention(x.q, x.k, x.v, without, {}, s, stream());
      ops().attention_backward(gradient, x.q, x.k, x.v, out_given, lse_given, dx.q, dx.k, dx.v, s, stream());
      return std::vector<Tensor>{bench().get(o), bench().get(l), bench().get(without), bench().get(dbuffer)};
    });
    const bool rounded = bench().rounds_attention(s.head_dim);
    EXPECT_WITHIN(results[0], out, dtype(), rounded);
    EXPECT_WITHIN(results[1], lse, dtype(), rounded);
    EXPECT_SAME_BITS(results[2], results[0]);
    EXPECT_WITHIN(results[3], d, dtype(), rounded);
  }
}

TEST_P(AttentionOps, LaterTokensDoNotChangeEarlierRows) {
  const AttentionShape s{1, 90, 1, 1, 16, 0.25F};
  lend(s);
  Random random(9);
  Tensor in = random.tensor(dtype(), packed_shape(s));
  const auto run = [&] {
    const Operand buffer = bench().put(in), out = bench().put(Tensor(dtype(), out_shape(s)));
    const Packed p = packed(s, buffer);
    ops().attention(p.q, p.k, p.v, out, {}, s, stream());
    return bench().get(out);
  };
  const Tensor before = run();
  const std::int64_t changed = 77;
  for (std::int64_t i = changed * packed_width(s); i < in.count(); ++i) in.set(i, random.normal(3.0F));
  const Tensor after = run();
  EXPECT_EQ(
      std::memcmp(before.view().data, after.view().data, static_cast<std::size_t>(changed * 16) * size_of(dtype())), 0);
  EXPECT_NE(before.get(changed * 16), after.get(changed * 16));
}

TEST_P(AttentionOps, HugeScoresNeitherOverflowNorLoseTheWinner) {
  const AttentionShape s{1, 3, 1, 1, 1, 1.0F};
  lend(s);
  Tensor in(dtype(), packed_shape(s));
  const float q[] = {1, 1, 1}, k[] = {500, -500, 400}, v[] = {1, 2, 3};
  for (std::int64_t t = 0; t < 3; ++t) {
    in.set(3 * t, q[t]);
    in.set(3 * t + 1, k[t]);
    in.set(3 * t + 2, v[t]);
  }
  const Operand buffer = bench().put(in), out = bench().put(Tensor(dtype(), out_shape(s)));
  const Operand lse = bench().put(Tensor(DType::f32, lse_shape(s)));
  const Packed p = packed(s, buffer);
  ops().attention(p.q, p.k, p.v, out, lse, s, stream());
  const Tensor o = bench().get(out), l = bench().get(lse);
  for (std::int64_t t = 0; t < 3; ++t) {
    EXPECT_EQ(o.get(t), 1.0);
    EXPECT_EQ(l.get(t), in.get(1));  // the largest score, as the type holds it
  }
}

TEST_P(AttentionOps, AHeadTooWideIsRefusedByName) {
  const AttentionShape s{1, 1, 1, 1, 257, 1.0F};
  lend(s);
  const Operand buffer = bench().put(Tensor(dtype(), packed_shape(s))),
                out = bench().put(Tensor(dtype(), out_shape(s)));
  const Packed p = packed(s, buffer);
  EXPECT_THROW(ops().attention(p.q, p.k, p.v, out, {}, s, stream()), MisuseError);
}

INSTANTIATE_TEST_SUITE_P(Activations, AttentionOps, ::testing::Values(DType::f32, DType::bf16), dtype_name);

}  // namespace
}  // namespace tandem::testing
