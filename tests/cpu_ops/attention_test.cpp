#include "cpu_ops/kernels.hpp"
#include "cpu_ops/reference/reference.hpp"
#include "tests/cpu_ops/op_testing.hpp"

namespace tandem::testing {
namespace {

class Attention : public ::testing::TestWithParam<DType> {};

// (B, T, heads, kv heads, head dim): odd, grouped, several blocks with a short last one, a single token.
const AttentionShape all_shapes[] = {{3, 37, 3, 1, 5, 0.4F},
                                     {1, 1, 1, 1, 16, 0.25F},
                                     {2, 64, 4, 2, 16, 0.25F},
                                     {1, 131, 6, 3, 64, 0.125F},
                                     {2, 200, 2, 2, 5, 0.5F}};

/// q, k, v side by side in one buffer of rows (H + 2 K) D, and their gradients likewise.
struct Packed {
  Packed(DType dtype, const AttentionShape& s)
      : shape(s), buffer(dtype, {s.batch, s.sequence, (s.heads + 2 * s.kv_heads) * s.head_dim}) {}
  Packed(Random& random, DType dtype, const AttentionShape& s) : Packed(dtype, s) {
    for (std::int64_t i = 0; i < buffer.count(); ++i) buffer.set(i, random.normal());
  }
  HeadsView part(std::int64_t first_head) const {
    auto* const data = static_cast<std::byte*>(buffer.view().data);
    return {data + static_cast<std::size_t>(first_head * shape.head_dim) * size_of(buffer.dtype()), buffer.dtype(),
            (shape.heads + 2 * shape.kv_heads) * shape.head_dim};
  }
  HeadsView q() const { return part(0); }
  HeadsView k() const { return part(shape.heads); }
  HeadsView v() const { return part(shape.heads + shape.kv_heads); }
  AttentionShape shape;
  Tensor buffer;
};

Shape out_shape(const AttentionShape& s) { return {s.batch, s.sequence, s.heads * s.head_dim}; }
Shape lse_shape(const AttentionShape& s) { return {s.batch, s.heads, s.sequence}; }

TEST_P(Attention, ForwardAndBackwardAreTheReference) {
  for (const AttentionShape& s : all_shapes) {
    SCOPED_TRACE(s.sequence);
    Random random(7);
    const Packed in(random, GetParam(), s);
    const Tensor dout = random.tensor(GetParam(), out_shape(s));
    Tensor out_expected(GetParam(), out_shape(s)), lse_expected(DType::f32, lse_shape(s));
    reference::attention(in.q(), in.k(), in.v(), out_expected, lse_expected, s);
    Packed d_expected(GetParam(), s);
    reference::attention_backward(dout, in.q(), in.k(), in.v(), out_expected, lse_expected, d_expected.q(),
                                  d_expected.k(), d_expected.v(), s);
    std::vector<Tensor> first;
    for (const auto& arena : arenas()) {
      LentWorkspace workspace(std::max(fast::attention_scratch(s.sequence, s.head_dim, arena->threads()),
                                       fast::attention_backward_scratch(s.sequence, s.head_dim, arena->threads())));
      Tensor out(GetParam(), out_shape(s)), lse(DType::f32, lse_shape(s));
      Packed d(GetParam(), s);
      fast::attention(*arena, workspace.get(), in.q(), in.k(), in.v(), out, lse, s);
      EXPECT_CLOSE(out, out_expected);
      EXPECT_CLOSE(lse, lse_expected);
      fast::attention_backward(*arena, workspace.get(), dout, in.q(), in.k(), in.v(), out_expected, lse_expected, d.q(),
                               d.k(), d.v(), s);
      EXPECT_CLOSE(d.buffer, d_expected.buffer);
      if (first.empty()) first = {out, lse, d.buffer};
      EXPECT_SAME_BITS(out, first[0]);
      EXPECT_SAME_BITS(lse, first[1]);
      EXPECT_SAME_BITS(d.buffer, first[2]);
    }
  }
}

TEST_P(Attention, WithoutLseTheOutputIsTheSame) {
  const AttentionShape s{2, 70, 2, 1, 16, 0.25F};
  Random random(8);
  const Packed in(random, GetParam(), s);
  Tensor with(GetParam(), out_shape(s)), without = with, lse(DType::f32, lse_shape(s));
  LentWorkspace workspace(fast::attention_scratch(s.sequence, s.head_dim, 2));
  fast::attention(*arenas()[1], workspace.get(), in.q(), in.k(), in.v(), with, lse, s);
  fast::attention(*arenas()[1], workspace.get(), in.q(), in.k(), in.v(), without, {}, s);
  EXPECT_SAME_BITS(with, without);
}

TEST(AttentionCausality, LaterTokensDoNotChangeEarlierRows) {
  const AttentionShape s{1, 90, 1, 1, 16, 0.25F};
  Random random(9);
  Packed in(random, DType::f32, s);
  Tensor before(DType::f32, out_shape(s)), after = before;
  LentWorkspace workspace(fast::attention_scratch(s.sequence, s.head_dim, 1));
  fast::attention(*arenas()[0], workspace.get(), in.q(), in.k(), in.v(), before, {}, s);
  const std::int64_t changed = 77;
  for (std::int64_t i = changed * 48; i < in.buffer.count(); ++i) in.buffer.set(i, random.normal(3.0F));
  fast::attention(*arenas()[0], workspace.get(), in.q(), in.k(), in.v(), after, {}, s);
  EXPECT_EQ(std::memcmp(before.view().data, after.view().data, static_cast<std::size_t>(changed * 16) * 4), 0);
  EXPECT_NE(before.get(changed * 16), after.get(changed * 16));
}

TEST(AttentionScores, HugeOnesNeitherOverflowNorLoseTheWinner) {
  const AttentionShape s{1, 3, 1, 1, 1, 1.0F};
  Packed in(DType::f32, s);
  const float q[] = {1, 1, 1}, k[] = {500, -500, 400}, v[] = {1, 2, 3};
  for (std::int64_t t = 0; t < 3; ++t) {
    in.buffer.set(3 * t, q[t]);
    in.buffer.set(3 * t + 1, k[t]);
    in.buffer.set(3 * t + 2, v[t]);
  }
  Tensor out(DType::f32, out_shape(s)), lse(DType::f32, lse_shape(s));
  LentWorkspace workspace(fast::attention_scratch(3, 1, 1));
  fast::attention(*arenas()[0], workspace.get(), in.q(), in.k(), in.v(), out, lse, s);
  for (std::int64_t t = 0; t < 3; ++t) {
    EXPECT_EQ(out.get(t), 1.0);
    EXPECT_EQ(lse.get(t), 500.0);
  }
}

/// The loss sum(dout * out) in double by central differences.
TEST(AttentionReference, BackwardIsTheDerivativeOfForward) {
  const AttentionShape s{1, 7, 2, 1, 3, 0.6F};
  Random random(10);
  Packed in(random, DType::f32, s), d(DType::f32, s);
  const Tensor dout = random.tensor(DType::f32, out_shape(s));
  Tensor out(DType::f32, out_shape(s)), lse(DType::f32, lse_shape(s));
  const auto loss = [&] {
    reference::attention(in.q(), in.k(), in.v(), out, lse, s);
    double sum = 0.0;
    for (std::int64_t i = 0; i < out.count(); ++i) sum += out.get(i) * dout.get(i);
    return sum;
  };
  loss();
  reference::attention_backward(dout, in.q(), in.k(), in.v(), out, lse, d.q(), d.k(), d.v(), s);
  for (std::int64_t i = 0; i < in.buffer.count(); ++i) {
    const float value = static_cast<float>(in.buffer.get(i)), step = 1.0F / 64;
    in.buffer.set(i, value + step);
    const double above = loss();
    in.buffer.set(i, value - step);
    const double below = loss();
    in.buffer.set(i, value);
    EXPECT_NEAR((above - below) / 2 / static_cast<double>(step), d.buffer.get(i), 2e-3) << i;
  }
}

class Rope : public ::testing::TestWithParam<DType> {};

TEST_P(Rope, IsTheReferenceAndTheInverseUndoesIt) {
  for (const std::int64_t dim : {2, 6, 16, 64}) {
    const Shape shape{3, 37, 3, dim};
    Random random(11);
    Tensor table(DType::f32, {37, dim / 2, 2});
    for (std::int64_t i = 0; i < table.count(); i += 2) {
      const float angle = random.normal(3.0F);
      table.set(i, std::cos(angle));
      table.set(i + 1, std::sin(angle));
    }
    const Tensor x = random.tensor(GetParam(), shape);
    for (const bool inverse : {false, true}) {
      Tensor expected = x;
      reference::rope(expected, table, inverse);
      for (const auto& arena : arenas()) {
        Tensor y = x;
        fast::rope(*arena, y, table, inverse);
        EXPECT_CLOSE(y, expected);
        fast::rope(*arena, y, table, !inverse);
        EXPECT_LE(relative_error(y, x), 2 * tolerance(GetParam()));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Activations, Attention, ::testing::Values(DType::f32, DType::bf16), dtype_name);
INSTANTIATE_TEST_SUITE_P(Activations, Rope, ::testing::Values(DType::f32, DType::bf16), dtype_name);

}  // namespace
}  // namespace tandem::testing
