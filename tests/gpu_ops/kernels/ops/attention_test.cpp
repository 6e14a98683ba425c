// Attention by GPU kernels against its reference.
#include <cstring>

#include "cpu_ops/reference/reference.hpp"
#include "tests/gpu_ops/kernels/bench.hpp"

namespace tandem::testing {
namespace {

// (B, T, heads, kv heads, head dim): odd, grouped, several tiles with a short last one, a single token, and each size
// of tile.
const AttentionShape all_shapes[] = {{3, 37, 3, 1, 5, 0.4F},     {1, 1, 1, 1, 16, 0.25F},  {2, 64, 4, 2, 16, 0.25F},
                                     {1, 131, 4, 2, 64, 0.125F}, {1, 50, 2, 1, 80, 0.11F}, {1, 33, 1, 1, 128, 0.1F},
                                     {1, 150, 2, 1, 128, 0.1F},  {1, 97, 1, 1, 24, 0.2F},  {1, 131, 2, 1, 200, 0.07F},
                                     {1, 64, 1, 1, 256, 0.06F}};

// Windows of one token and two, shorter and longer than a tile and as long, and of all tokens but one.
const AttentionShape windowed_shapes[] = {{2, 37, 2, 1, 5, 0.4F, 1},     {1, 70, 1, 1, 16, 0.25F, 2},
                                          {1, 131, 2, 1, 24, 0.2F, 37},  {1, 97, 1, 1, 128, 0.1F, 64},
                                          {1, 131, 1, 1, 80, 0.11F, 65}, {1, 67, 1, 1, 16, 0.25F, 66},
                                          {1, 97, 2, 1, 200, 0.07F, 17}};

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
  /// out, lse, and the gradients of `in`.
  std::vector<Tensor> run(const Tensor& in, const Tensor& dout, const AttentionShape& s) {
    const Operand buffer = bench().put(in), gradient = bench().put(dout);
    const Operand out = bench().put(Tensor(dtype(), out_shape(s))), d = bench().put(Tensor(dtype(), packed_shape(s)));
    const Operand lse = bench().put(Tensor(DType::f32, lse_shape(s)));
    const Packed x = packed(s, buffer), dx = packed(s, d);
    ops().attention(x.q, x.k, x.v, out, lse, s, stream());
    ops().attention_backward(gradient, x.q, x.k, x.v, out, lse, dx.q, dx.k, dx.v, s, stream());
    return {bench().get(out), bench().get(lse), bench().get(d)};
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
    EXPECT_WITHIN(results[0], out, dtype(), true);
    EXPECT_WITHIN(results[1], lse, dtype(), true);
    EXPECT_SAME_BITS(results[2], results[0]);
    EXPECT_WITHIN(results[3], d, dtype(), true);
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

// Once each: a window moves no barrier.
TEST_P(AttentionOps, WindowsAreTheReferences) {
  for (const AttentionShape& s : windowed_shapes) {
    SCOPED_TRACE(std::to_string(s.sequence) + " tokens, dim " + std::to_string(s.head_dim) + ", window " +
                 std::to_string(s.window));
    lend(s);
    Random random(17);
    const Tensor in = random.tensor(dtype(), packed_shape(s)), dout = random.tensor(dtype(), out_shape(s));
    Tensor out(dtype(), out_shape(s)), lse(DType::f32, lse_shape(s)), d(dtype(), packed_shape(s));
    const Packed p = packed(s, in), dp = packed(s, d);
    reference::attention(p.q, p.k, p.v, out, lse, s);
    const std::vector<Tensor> results = run(in, dout, s);
    reference::attention_backward(dout, p.q, p.k, p.v, results[0], results[1], dp.q, dp.k, dp.v, s);
    EXPECT_WITHIN(results[0], out, dtype(), true);
    EXPECT_WITHIN(results[1], lse, dtype(), true);
    EXPECT_WITHIN(results[2], d, dtype(), true);
  }
}

TEST_P(AttentionOps, AWindowOfAllTokensOrMoreChangesNoBit) {
  AttentionShape s{1, 67, 1, 1, 16, 0.25F};
  lend(s);
  Random random(14);
  const Tensor in = random.tensor(dtype(), packed_shape(s)), dout = random.tensor(dtype(), out_shape(s));
  const std::vector<Tensor> none = run(in, dout, s);
  for (const std::int64_t longer : {67, 72}) {
    s.window = longer;
    const std::vector<Tensor> results = run(in, dout, s);
    for (std::size_t i = 0; i < none.size(); ++i) EXPECT_SAME_BITS(results[i], none[i]) << i;
  }
  s.window = 66;
  EXPECT_NE(run(in, dout, s)[0].bytes(), none[0].bytes());
}

TEST_P(AttentionOps, TokensOutsideOfTheWindowChangeNothing) {
  const AttentionShape s{1, 90, 1, 1, 16, 0.25F, 21};
  lend(s);
  Random random(15);
  Tensor in = random.tensor(dtype(), packed_shape(s));
  const Tensor dout = random.tensor(dtype(), out_shape(s));
  const std::vector<Tensor> before = run(in, dout, s);
  const std::int64_t changed = 50, unaware = changed + s.window - 1, width = packed_width(s);
  for (std::int64_t t = 0; t < changed; ++t) {  // their keys and values
    for (std::int64_t i = s.head_dim; i < width; ++i) in.set(t * width + i, random.normal(3.0F));
  }
  const std::vector<Tensor> after = run(in, dout, s);
  const auto same = [&](std::size_t result, std::int64_t row, std::int64_t first, std::int64_t last) {
    const std::size_t size = size_of(dtype()), at = static_cast<std::size_t>(first * row) * size;
    return std::memcmp(after[result].bytes().data() + at, before[result].bytes().data() + at,
                       static_cast<std::size_t>((last - first) * row) * size) == 0;
  };
  EXPECT_TRUE(same(0, s.head_dim, unaware, s.sequence));
  EXPECT_TRUE(same(2, width, unaware, s.sequence));
  EXPECT_FALSE(same(0, s.head_dim, unaware - 1, unaware));
  EXPECT_FALSE(same(2, width, unaware - 1, unaware));
}

TEST_P(AttentionOps, GradientsReachNoFurtherThanTheWindow) {
  const AttentionShape s{1, 90, 1, 1, 16, 0.25F, 21};
  lend(s);
  Random random(16);
  const Tensor in = random.tensor(dtype(), packed_shape(s));
  Tensor dout = random.tensor(dtype(), out_shape(s));
  const std::int64_t first = 75, reached = first - s.window + 1, width = packed_width(s);
  for (std::int64_t i = 0; i < first * s.head_dim; ++i) dout.set(i, 0.0F);
  const Tensor d = run(in, dout, s)[2];
  for (std::int64_t i = 0; i < reached * width; ++i) ASSERT_EQ(d.get(i), 0.0) << i;
  for (std::int64_t i = s.head_dim; i < width; ++i) EXPECT_NE(d.get(reached * width + i), 0.0) << i;
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
