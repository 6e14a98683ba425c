// Linear layers and the loss of the head by GPU kernels against their references.
#include "cpu_ops/reference/reference.hpp"
#include "tests/gpu_ops/kernels/bench.hpp"

namespace tandem::testing {
namespace {

struct Sizes {
  std::int64_t rows, in, out;
};
// Odd ones, several tiles in every direction, multiples of eight, and ones.
constexpr Sizes all_sizes[] = {{1, 1, 1},   {111, 52, 24},  {37, 24, 101}, {22, 55, 1},
                               {3, 200, 1}, {67, 801, 133}, {64, 64, 72}};

class LinearOps : public OpsTest {
 protected:
  void lend(const Sizes& s) {
    bench().lend({.tokens = s.rows, .channels = std::max(s.in, s.out), .activations = dtype()});
  }
};

TEST_P(LinearOps, ForwardIsTheReference) {
  for (const Sizes& s : all_sizes) {
    lend(s);
    for (const bool with_bias : {false, true}) {
      for (const DType result : {dtype(), DType::f32}) {
        SCOPED_TRACE(s.rows);
        Random random(1);
        const Tensor x = random.tensor(dtype(), {s.rows, s.in}), w = random.tensor(DType::bf16, {s.out, s.in});
        const Tensor bias = random.tensor(DType::bf16, {s.out});
        Tensor expected(result, {s.rows, s.out});
        reference::linear(x, w, with_bias ? bias.view() : TensorView{}, expected);
        const auto results = under_all_schedules([&] {
          const Operand in = bench().put(x), weight = bench().put(w), b = bench().put(bias);
          const Operand y = bench().put(Tensor(result, {s.rows, s.out}));
          ops().linear(in, weight, with_bias ? b.view() : TensorView{}, y, stream());
          return std::vector<Tensor>{bench().get(y)};
        });
        EXPECT_WITHIN(results[0], expected, dtype(), false);
      }
    }
  }
}

TEST_P(LinearOps, WithResidualIsTheSumRoundedOnce) {
  for (const Sizes& s : all_sizes) {
    lend(s);
    for (const bool with_bias : {false, true}) {
      SCOPED_TRACE(s.rows);
      Random random(7);
      const Tensor x = random.tensor(dtype(), {s.rows, s.in}), w = random.tensor(DType::bf16, {s.out, s.in});
      const Tensor bias = random.tensor(DType::bf16, {s.out}), residual = random.tensor(dtype(), {s.rows, s.out});
      Tensor product(DType::f32, {s.rows, s.out}), expected(dtype(), {s.rows, s.out});
      reference::linear(x, w, with_bias ? bias.view() : TensorView{}, product);
      for (std::int64_t i = 0; i < expected.count(); ++i) {
        expected.set(i, static_cast<float>(product.get(i) + residual.get(i)));
      }
      const auto results = under_all_schedules([&] {
        const Operand in = bench().put(x), weight = bench().put(w), b = bench().put(bias), r = bench().put(residual);
        const Operand y = bench().put(Tensor(dtype(), {s.rows, s.out}));
        ops().linear_add(in, weight, with_bias ? b.view() : TensorView{}, r, y, stream());
        return std::vector<Tensor>{bench().get(y), bench().get(r)};
      });
      EXPECT_WITHIN(results[0], expected, dtype(), false);
      EXPECT_SAME_BITS(results[1], residual);
    }
  }
}

TEST_P(LinearOps, BackwardOfTheInputIsTheReference) {
  for (const Sizes& s : all_sizes) {
    lend(s);
    for (const auto& [accumulate, type] : {std::pair(false, dtype()), {true, dtype()}, {true, DType::f32}}) {
      SCOPED_TRACE(s.rows);
      Random random(2);
      const Tensor dy = random.tensor(dtype(), {s.rows, s.out}), w = random.tensor(DType::bf16, {s.out, s.in});
      const Tensor before = random.tensor(type, {s.rows, s.in});
      Tensor expected = before;
      reference::linear_backward_input(dy, w, expected, accumulate);
      const auto results = under_all_schedules([&, adds = accumulate] {
        const Operand d = bench().put(dy), weight = bench().put(w), dx = bench().put(before);
        ops().linear_backward_input(d, weight, dx, adds, stream());
        return std::vector<Tensor>{bench().get(dx)};
      });
      EXPECT_WITHIN(results[0], expected, dtype(), false);
    }
  }
}

// An fp32 gradient is added to, a bf16 one is written.
TEST_P(LinearOps, BackwardOfTheWeightIsTheReference) {
  for (const Sizes& s : all_sizes) {
    lend(s);
    for (const DType result : {DType::f32, DType::bf16}) {
      SCOPED_TRACE(s.rows);
      Random random(3);
      const Tensor dy = random.tensor(dtype(), {s.rows, s.out}), x = random.tensor(dtype(), {s.rows, s.in});
      const Tensor dw_before = random.tensor(result, {s.out, s.in}), db_before = random.tensor(DType::f32, {s.out});
      Tensor dw_expected = dw_before, db_expected = db_before;
      reference::linear_backward_weight(dy, x, dw_expected, db_expected);
      const auto results = under_all_schedules([&] {
        const Operand d = bench().put(dy), in = bench().put(x);
        const Operand dw = bench().put(dw_before), dw_alone = bench().put(dw_before);
        const Operand db = bench().put(db_before), db_alone = bench().put(db_before);
        ops().linear_backward_weight(d, in, dw, db, stream());
        ops().linear_backward_weight(d, in, dw_alone, {}, stream());
        ops().linear_backward_weight(d, in, {}, db_alone, stream());
        return std::vector<Tensor>{bench().get(dw), bench().get(db), bench().get(dw_alone), bench().get(db_alone)};
      });
      EXPECT_WITHIN(results[0], dw_expected, dtype(), false);
      EXPECT_WITHIN(results[1], db_expected, dtype(), false);
      EXPECT_SAME_BITS(results[2], results[0]);
      EXPECT_SAME_BITS(results[3], results[1]);
    }
  }
}

TEST_P(LinearOps, WithGeluIsTheReference) {
  for (const Sizes& s : all_sizes) {
    lend(s);
    for (const bool with_bias : {false, true}) {
      SCOPED_TRACE(s.rows);
      Random random(5);
      const Tensor x = random.tensor(dtype(), {s.rows, s.in}), w = random.tensor(DType::bf16, {s.out, s.in});
      const Tensor bias = random.tensor(DType::bf16, {s.out});
      Tensor up_expected(dtype(), {s.rows, s.out}), act_expected(dtype(), {s.rows, s.out});
      reference::linear(x, w, with_bias ? bias.view() : TensorView{}, up_expected);
      reference::gelu(up_expected, act_expected);
      const auto results = under_all_schedules([&] {
        const Operand in = bench().put(x), weight = bench().put(w), b = bench().put(bias);
        const Operand up = bench().put(Tensor(dtype(), {s.rows, s.out}));
        const Operand act = bench().put(Tensor(dtype(), {s.rows, s.out}));
        const Operand again = bench().put(Tensor(dtype(), {s.rows, s.out}));
        ops().linear_gelu(in, weight, with_bias ? b.view() : TensorView{}, up, act, stream());
        ops().gelu(up, again, stream());
        return std::vector<Tensor>{bench().get(up), bench().get(act), bench().get(again)};
      });
      EXPECT_WITHIN(results[0], up_expected, dtype(), false);
      EXPECT_WITHIN(results[1], act_expected, dtype(), true);
      if (ops().repeats_gelu()) {
        EXPECT_SAME_BITS(results[2], results[1]);
      }
    }
  }
}

TEST_P(LinearOps, BackwardThroughGeluIsTheReference) {
  for (const Sizes& s : all_sizes) {
    lend(s);
    SCOPED_TRACE(s.rows);
    Random random(6);
    const Tensor dy = random.tensor(dtype(), {s.rows, s.out}), w = random.tensor(DType::bf16, {s.out, s.in});
    const Tensor up = random.tensor(dtype(), {s.rows, s.in});
    Tensor expected(dtype(), {s.rows, s.in});
    reference::linear_backward_input(dy, w, expected, false);
    reference::gelu_backward(expected, up, expected);
    const auto results = under_all_schedules([&] {
      const Operand d = bench().put(dy), weight = bench().put(w), input = bench().put(up);
      const Operand dup = bench().put(Tensor(dtype(), {s.rows, s.in}));
      ops().linear_gelu_backward_input(d, weight, input, dup, stream());
      return std::vector<Tensor>{bench().get(dup), bench().get(input)};
    });
    EXPECT_WITHIN(results[0], expected, dtype(), true);
    EXPECT_SAME_BITS(results[1], up);
  }
}

TEST_P(LinearOps, HeadLossIsTheReferenceWithAndWithoutGradients) {
  // An odd vocabulary, a small one, and one whose rows pass several packets of a block.
  for (const Sizes& s : {Sizes{37, 24, 101}, Sizes{5, 52, 3}, Sizes{9, 16, 2111}, Sizes{8, 64, 96}}) {
    const std::int64_t rows = s.rows, channels = s.in, vocabulary = s.out;
    SCOPED_TRACE(vocabulary);
    bench().lend({.tokens = rows, .vocabulary = vocabulary, .channels = channels, .activations = dtype()});
    Random random(4);
    const Tensor x = random.tensor(dtype(), {rows, channels}), w = random.tensor(DType::bf16, {vocabulary, channels});
    Tensor targets = random.tokens({rows}, static_cast<std::int32_t>(vocabulary));
    targets.view().as<std::int32_t>()[3] = -1;
    const Tensor dw_before = random.tensor(DType::f32, {vocabulary, channels}, 0.01F);
    Tensor losses(DType::f32, {rows}), dx(dtype(), {rows, channels}), dw = dw_before;
    const float scale = 0.125F;
    reference::head_loss({x, w, targets, losses, scale, dx, dw});
    const auto results = under_all_schedules([&] {
      const Operand in = bench().put(x), weight = bench().put(w), t = bench().put(targets);
      const Operand l = bench().put(Tensor(DType::f32, {rows})), alone = bench().put(Tensor(DType::f32, {rows}));
      const Operand d = bench().put(Tensor(dtype(), {rows, channels})), dweight = bench().put(dw_before);
      const Operand frozen = bench().put(Tensor(dtype(), {rows, channels}));
      ops().head_loss({in, weight, t, l, scale, d, dweight}, stream());
      ops().head_loss({in, weight, t, alone, scale, {}, {}}, stream());
      ops().head_loss({in, weight, t, alone, scale, frozen, {}}, stream());
      return std::vector<Tensor>{bench().get(l), bench().get(d), bench().get(dweight), bench().get(alone),
                                 bench().get(frozen)};
    });
    EXPECT_WITHIN(results[0], losses, dtype(), false);
    EXPECT_WITHIN(results[1], dx, dtype(), true);
    EXPECT_WITHIN(results[2], dw, dtype(), true);
    EXPECT_SAME_BITS(results[3], results[0]);
    EXPECT_SAME_BITS(results[4], results[1]);
  }
}

TEST_P(LinearOps, AGradientOfTheHeadInBf16IsWrittenWhole) {
  for (const Sizes& s : {Sizes{37, 24, 101}, Sizes{5, 52, 3}, Sizes{9, 16, 2111}, Sizes{8, 64, 96}}) {
    const std::int64_t rows = s.rows, channels = s.in, vocabulary = s.out;
    SCOPED_TRACE(vocabulary);
    bench().lend({.tokens = rows,
                  .vocabulary = vocabulary,
                  .channels = channels,
                  .activations = dtype(),
                  .head_rows = vocabulary});
    Random random(4);
    const Tensor x = random.tensor(dtype(), {rows, channels}), w = random.tensor(DType::bf16, {vocabulary, channels});
    const Tensor targets = random.tokens({rows}, static_cast<std::int32_t>(vocabulary));
    const Tensor anything = random.tensor(DType::bf16, {vocabulary, channels});
    Tensor losses(DType::f32, {rows}), dx(dtype(), {rows, channels}), dw = anything;
    reference::head_loss({x, w, targets, losses, 0.125F, dx, dw});
    const auto results = under_all_schedules([&] {
      const Operand in = bench().put(x), weight = bench().put(w), t = bench().put(targets);
      const Operand l = bench().put(Tensor(DType::f32, {rows})), dweight = bench().put(anything);
      const Operand d = bench().put(Tensor(dtype(), {rows, channels})),
                    frozen = bench().put(Tensor(dtype(), {rows, channels}));
      const Operand alone = bench().put(Tensor(DType::f32, {rows}));
      ops().head_loss({in, weight, t, l, 0.125F, d, dweight}, stream());
      ops().head_loss({in, weight, t, alone, 0.125F, frozen, {}}, stream());
      return std::vector<Tensor>{bench().get(l), bench().get(d), bench().get(dweight), bench().get(alone),
                                 bench().get(frozen)};
    });
    EXPECT_WITHIN(results[0], losses, dtype(), false);
    EXPECT_WITHIN(results[1], dx, dtype(), true);
    EXPECT_WITHIN(results[2], dw, DType::bf16, true);
    EXPECT_SAME_BITS(results[3], results[0]);
    EXPECT_SAME_BITS(results[4], results[1]);
  }
}

// Logits are made once more for some rows of the weight at a time; the last ones are fewer.
TEST_P(LinearOps, AGradientOfTheHeadInSlicesIsTheReference) {
  for (const Sizes& s : {Sizes{37, 24, 101}, Sizes{5, 52, 3}, Sizes{9, 16, 2111}, Sizes{8, 64, 96}}) {
    const std::int64_t rows = s.rows, channels = s.in, vocabulary = s.out, at_once = vocabulary / 2 + 3;
    SCOPED_TRACE(vocabulary);
    Random random(4);
    const Tensor x = random.tensor(dtype(), {rows, channels}), w = random.tensor(DType::bf16, {vocabulary, channels});
    Tensor targets = random.tokens({rows}, static_cast<std::int32_t>(vocabulary));
    targets.view().as<std::int32_t>()[3] = -1;
    const Tensor anything = random.tensor(DType::bf16, {vocabulary, channels});
    Tensor losses(DType::f32, {rows}), dx(dtype(), {rows, channels}), dw = anything;
    reference::head_loss({x, w, targets, losses, 0.125F, dx, dw});
    const auto results = under_all_schedules([&] {
      bench().lend({.tokens = rows,
                    .vocabulary = vocabulary,
                    .channels = channels,
                    .activations = dtype(),
                    .head_rows = at_once});
      const Operand in = bench().put(x), weight = bench().put(w), t = bench().put(targets);
      const Operand l = bench().put(Tensor(DType::f32, {rows})), dweight = bench().put(anything);
      const Operand d = bench().put(Tensor(dtype(), {rows, channels})), alone = bench().put(anything);
      HeadLoss head{in, weight, t, l, 0.125F, d, dweight};
      head.rows_at_once = at_once;
      ops().head_loss(head, stream());
      head.dx = {};
      head.dweight = alone;
      ops().head_loss(head, stream());
      return std::vector<Tensor>{bench().get(l), bench().get(d), bench().get(dweight), bench().get(alone)};
    });
    EXPECT_WITHIN(results[0], losses, dtype(), false);
    EXPECT_WITHIN(results[1], dx, dtype(), true);
    EXPECT_WITHIN(results[2], dw, DType::bf16, true);
    EXPECT_SAME_BITS(results[3], results[2]);
  }
}

// Sequences of ten rows, one of which has the factor 0: with f32 gradients, bf16 ones, in slices, and rows of tokens.
TEST_P(LinearOps, FactorsOfSequencesAreInAllGradientsOfTheHead) {
  const std::int64_t rows = 40, channels = 24, vocabulary = 101;
  Random random(9);
  const Tensor x = random.tensor(dtype(), {rows, channels}), w = random.tensor(DType::bf16, {vocabulary, channels});
  Tensor targets = random.tokens({rows}, static_cast<std::int32_t>(vocabulary)), factors(DType::f32, {4});
  targets.view().as<std::int32_t>()[3] = -1;
  const Tensor tokens = random.tokens({rows}, static_cast<std::int32_t>(vocabulary));
  for (std::int64_t i = 0; i < 4; ++i)
    factors.set(i, std::vector{0.5F, -0.5F, 0.0F, 3.0F}[static_cast<std::size_t>(i)]);
  for (const auto& [gradient, at_once, token_rows] : {std::tuple{DType::f32, 0, false},
                                                      {DType::bf16, 101, false},
                                                      {DType::bf16, 34, false},
                                                      {DType::bf16, 101, true}}) {
    SCOPED_TRACE(at_once);
    bench().lend({.tokens = rows,
                  .vocabulary = vocabulary,
                  .channels = channels,
                  .activations = dtype(),
                  .head_rows = at_once,
                  .token_rows = token_rows});
    Tensor losses(DType::f32, {rows}), dx(dtype(), {rows, channels}), dw(gradient, {vocabulary, channels});
    Tensor of_tokens(DType::f32, {rows, channels});
    HeadLoss expected{x, w, targets, losses, 0.125F, dx, dw, factors};
    expected.rows_at_once = at_once;
    if (token_rows) expected.tokens = tokens, expected.token_rows = of_tokens;
    reference::head_loss(expected);
    const auto results = under_all_schedules([&, with_rows = token_rows, written = at_once, type = gradient] {
      const Operand in = bench().put(x), weight = bench().put(w), t = bench().put(targets), f = bench().put(factors);
      const Operand l = bench().put(Tensor(DType::f32, {rows})), d = bench().put(Tensor(dtype(), {rows, channels}));
      const Operand dweight = bench().put(Tensor(type, {vocabulary, channels})), i = bench().put(tokens);
      const Operand r = bench().put(Tensor(DType::f32, {rows, channels}));
      HeadLoss head{in, weight, t, l, 0.125F, d, dweight, f};
      head.rows_at_once = written;
      if (with_rows) head.tokens = i, head.token_rows = r;
      ops().head_loss(head, stream());
      return std::vector<Tensor>{bench().get(l), bench().get(d), bench().get(dweight), bench().get(r)};
    });
    EXPECT_WITHIN(results[0], losses, dtype(), false);
    EXPECT_WITHIN(results[1], dx, dtype(), true);
    EXPECT_WITHIN(results[2], dw, gradient == DType::f32 ? dtype() : DType::bf16, true);
    if (token_rows) EXPECT_WITHIN(results[3], of_tokens, dtype(), true);
    for (std::int64_t i = 0; i < 10 * channels; ++i) ASSERT_EQ(results[1].get(20 * channels + i), 0.0) << i;
  }
}

// Gradient of a weight that is the embedding table too, with more tokens than the vocabulary has, and than a block has
// threads.
TEST_P(LinearOps, RowsOfTokensAreThoseOfTheHeadsGradientBeforeTheyAreRounded) {
  for (const Sizes& s : {Sizes{37, 24, 101}, Sizes{5, 52, 3}, Sizes{9, 16, 2111}, Sizes{301, 40, 96}}) {
    const std::int64_t rows = s.rows, channels = s.in, vocabulary = s.out;
    SCOPED_TRACE(vocabulary);
    bench().lend({.tokens = rows,
                  .vocabulary = vocabulary,
                  .channels = channels,
                  .activations = dtype(),
                  .head_rows = vocabulary,
                  .token_rows = true});
    Random random(4);
    const Tensor x = random.tensor(dtype(), {rows, channels}), w = random.tensor(DType::bf16, {vocabulary, channels});
    const Tensor targets = random.tokens({rows}, static_cast<std::int32_t>(vocabulary));
    Tensor tokens = random.tokens({rows}, static_cast<std::int32_t>(vocabulary));
    Tensor losses(DType::f32, {rows}), dx(dtype(), {rows, channels}), dw(DType::bf16, {vocabulary, channels});
    Tensor of_tokens(DType::f32, {rows, channels});
    reference::head_loss({x, w, targets, losses, 0.125F, dx, dw, {}, tokens, of_tokens});
    tokens.view().as<std::int32_t>()[1] = -1;  // ids outside of the vocabulary: their rows are zeros
    tokens.view().as<std::int32_t>()[2] = static_cast<std::int32_t>(vocabulary);
    for (std::int64_t i = channels; i < 3 * channels; ++i) of_tokens.set(i, 0.0F);
    const auto results = under_all_schedules([&] {
      const Operand in = bench().put(x), weight = bench().put(w), t = bench().put(targets), i = bench().put(tokens);
      const Operand l = bench().put(Tensor(DType::f32, {rows})), d = bench().put(Tensor(dtype(), {rows, channels}));
      const Operand dweight = bench().put(dw), alone = bench().put(dw);
      const Operand r = bench().put(random.tensor(DType::f32, {rows, channels}));
      ops().head_loss({in, weight, t, l, 0.125F, d, alone}, stream());
      ops().head_loss({in, weight, t, l, 0.125F, d, dweight, {}, i, r}, stream());
      const Operand again = bench().put(Tensor(DType::bf16, {vocabulary, channels}));
      const Operand rows_again = bench().put(Tensor(DType::f32, {rows, channels}));
      ops().head_loss({in, weight, t, l, 0.125F, {}, again, {}, i, rows_again}, stream());
      return std::vector<Tensor>{bench().get(r), bench().get(dweight), bench().get(alone), bench().get(again),
                                 bench().get(rows_again)};
    });
    EXPECT_SAME_BITS(results[3], results[1]);  // without the input's gradient
    EXPECT_SAME_BITS(results[4], results[0]);
    EXPECT_WITHIN(results[0], of_tokens, dtype(), true);
    EXPECT_WITHIN(results[1], dw, DType::bf16, true);
    EXPECT_SAME_BITS(results[2], results[1]);
  }
}

TEST_P(LinearOps, ATargetBeyondTheVocabularyShowsAsNaN) {
  bench().lend({.tokens = 2, .vocabulary = 11, .channels = 8, .activations = dtype()});
  Random random(6);
  Tensor targets(DType::i32, {2});
  targets.view().as<std::int32_t>()[1] = 11;
  const Operand x = bench().put(random.tensor(dtype(), {2, 8})), w = bench().put(random.tensor(DType::bf16, {11, 8}));
  const Operand t = bench().put(targets), losses = bench().put(Tensor(DType::f32, {2}));
  const Operand dx = bench().put(Tensor(dtype(), {2, 8}));
  ops().head_loss({x, w, t, losses, 1.0F, dx, {}}, stream());
  const Tensor l = bench().get(losses), d = bench().get(dx);
  EXPECT_FALSE(std::isnan(l.get(0)));
  EXPECT_TRUE(std::isnan(l.get(1)));
  EXPECT_FALSE(std::isnan(d.get(7)));
  EXPECT_TRUE(std::isnan(d.get(8)));
}

INSTANTIATE_TEST_SUITE_P(Activations, LinearOps, ::testing::Values(DType::f32, DType::bf16), dtype_name);

}  // namespace
}  // namespace tandem::testing
