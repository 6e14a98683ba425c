// Linear layers and the loss of the head on the CPU against their references.
#include "cpu_ops/kernels/kernels.hpp"
#include "cpu_ops/reference/reference.hpp"
#include "tests/cpu_ops/op_testing.hpp"

namespace tandem::testing {
namespace {

struct Sizes {
  std::int64_t rows, in, out;
};
// Odd ones, one that needs several tiles of rows, columns and depth, and ones.
constexpr Sizes all_sizes[] = {{1, 1, 1}, {111, 52, 24}, {37, 24, 101}, {22, 55, 1}, {3, 200, 1}, {517, 801, 133}};

class Linear : public ::testing::TestWithParam<DType> {};

/// Runs `kernel(arena, workspace)` on every thread count; `make` gives fresh outputs, all must come out alike.
template <class Make, class Kernel>
auto on_all_threads(const Sizes& s, DType dtype, const Make& make, const Kernel& kernel) {
  auto first = make();
  bool have = false;
  for (const auto& arena : arenas()) {
    LentWorkspace workspace(fast::linear_scratch(s.rows, s.in, s.out, dtype, arena->threads()));
    auto result = make();
    kernel(*arena, workspace.get(), result);
    if (have) {
      EXPECT_SAME_BITS(result, first) << arena->threads() << " threads";
    }
    first = result;
    have = true;
  }
  return first;
}

TEST_P(Linear, ForwardIsTheReference) {
  for (const Sizes& s : all_sizes) {
    SCOPED_TRACE(s.rows);
    for (const bool with_bias : {false, true}) {
      for (const DType result : {GetParam(), DType::f32}) {
        Random random(1);
        const Tensor x = random.tensor(GetParam(), {s.rows, s.in}), w = random.tensor(DType::bf16, {s.out, s.in});
        const Tensor bias = random.tensor(DType::bf16, {s.out});
        const TensorView b = with_bias ? bias.view() : TensorView{};
        Tensor expected(result, {s.rows, s.out});
        reference::linear(x, w, b, expected);
        const Tensor y = on_all_threads(
            s, GetParam(),
            [&] {
              return Tensor(result, {s.rows, s.out});
            },
            [&](Parallel& p, const fast::Workspace& lent, Tensor& out) { fast::linear(p, lent, x, w, b, out); });
        EXPECT_CLOSE(y, expected);
      }
    }
  }
}

TEST_P(Linear, BackwardOfTheInputIsTheReference) {
  for (const Sizes& s : all_sizes) {
    SCOPED_TRACE(s.rows);
    for (const auto& [accumulate, type] : {std::pair(false, GetParam()), {true, GetParam()}, {true, DType::f32}}) {
      Random random(2);
      const Tensor dy = random.tensor(GetParam(), {s.rows, s.out}), w = random.tensor(DType::bf16, {s.out, s.in});
      const Tensor before = random.tensor(type, {s.rows, s.in});
      Tensor expected = before;
      reference::linear_backward_input(dy, w, expected, accumulate);
      const Tensor dx = on_all_threads(
          s, GetParam(), [&] { return before; },
          [&, adds = accumulate](Parallel& p, const fast::Workspace& lent, Tensor& out) {
            fast::linear_backward_input(p, lent, dy, w, out, adds);
          });
      EXPECT_CLOSE(dx, expected);
    }
  }
}

TEST_P(Linear, BackwardOfTheWeightAddsTheReference) {
  for (const Sizes& s : all_sizes) {
    SCOPED_TRACE(s.rows);
    Random random(3);
    const Tensor dy = random.tensor(GetParam(), {s.rows, s.out}), x = random.tensor(GetParam(), {s.rows, s.in});
    const Tensor dw_before = random.tensor(DType::f32, {s.out, s.in}), db_before = random.tensor(DType::f32, {s.out});
    Tensor dw_expected = dw_before, db_expected = db_before, db = db_before;
    reference::linear_backward_weight(dy, x, dw_expected, db_expected);
    const Tensor dw = on_all_threads(
        s, GetParam(), [&] { return dw_before; },
        [&](Parallel& p, const fast::Workspace& lent, Tensor& out) {
          db = db_before;
          fast::linear_backward_weight(p, lent, dy, x, out, db);
        });
    EXPECT_CLOSE(dw, dw_expected);
    EXPECT_CLOSE(db, db_expected);
  }
}

TEST_P(Linear, BackwardOfTheWeightInBf16IsTheSumRounded) {
  for (const Sizes& s : all_sizes) {
    SCOPED_TRACE(s.rows);
    Random random(6);
    const Tensor dy = random.tensor(GetParam(), {s.rows, s.out}), x = random.tensor(GetParam(), {s.rows, s.in});
    const Tensor anything = random.tensor(DType::bf16, {s.out, s.in});
    const Tensor sum = on_all_threads(
        s, GetParam(),
        [&] {
          return Tensor(DType::f32, {s.out, s.in});
        },
        [&](Parallel& p, const fast::Workspace& lent, Tensor& out) {
          fast::linear_backward_weight(p, lent, dy, x, out, {});
        });
    const Tensor written = on_all_threads(
        s, GetParam(), [&] { return anything; },
        [&](Parallel& p, const fast::Workspace& lent, Tensor& out) {
          fast::linear_backward_weight(p, lent, dy, x, out, {});
        });
    EXPECT_SAME_BITS(written, rounded(sum));
  }
}

TEST_P(Linear, BackwardOfTheBiasAloneIsTheSame) {
  Random random(7);
  const Tensor dy = random.tensor(GetParam(), {37, 24}), x = random.tensor(GetParam(), {37, 52});
  Tensor dw(DType::f32, {24, 52}), together(DType::f32, {24}), alone(DType::f32, {24});
  LentWorkspace workspace(fast::linear_scratch(37, 52, 24, GetParam(), arenas()[0]->threads()));
  fast::linear_backward_weight(*arenas()[0], workspace.get(), dy, x, dw, together);
  fast::linear_backward_weight(*arenas()[0], workspace.get(), dy, x, {}, alone);
  EXPECT_SAME_BITS(alone, together);
}

TEST_P(Linear, RefusesAWorkspaceThatIsTooSmall) {
  Random random(4);
  const Tensor x = random.tensor(GetParam(), {8, 24}), w = random.tensor(DType::bf16, {52, 24});
  Tensor y(GetParam(), {8, 52});
  LentWorkspace workspace(256);
  EXPECT_THROW(fast::linear(*arenas()[0], workspace.get(), x, w, {}, y), MisuseError);
}

/// Rows, channels and vocabulary. The last has so large a vocabulary that its rows need several chunks.
using HeadSize = std::tuple<std::int64_t, std::int64_t, std::int64_t>;
constexpr HeadSize head_sizes[] = {{1, 52, 101}, {111, 52, 101}, {37, 52, 5}, {9, 3, 900001}};

class HeadLossTest : public ::testing::TestWithParam<std::tuple<DType, HeadSize>> {
 protected:
  const DType dtype_ = std::get<0>(GetParam());
  const std::int64_t rows_ = std::get<0>(std::get<1>(GetParam()));
  const std::int64_t channels_ = std::get<1>(std::get<1>(GetParam()));
  const std::int64_t vocabulary_ = std::get<2>(std::get<1>(GetParam()));
};

std::string head_name(const ::testing::TestParamInfo<HeadLossTest::ParamType>& info) {
  const auto& [dtype, size] = info.param;
  return std::string(name_of(dtype)) + "_" + std::to_string(std::get<0>(size)) + "_of_" +
         std::to_string(std::get<2>(size));
}

TEST_P(HeadLossTest, LossAndGradientsAreTheReference) {
  Random random(5);
  const Tensor x = random.tensor(dtype_, {rows_, channels_}),
               w = random.tensor(DType::bf16, {vocabulary_, channels_}, 0.3F);
  Tensor targets = random.tokens({rows_}, static_cast<std::int32_t>(vocabulary_));
  if (rows_ > 1) targets.view().as<std::int32_t>()[1] = -1;
  const Tensor dw_before = random.tensor(DType::f32, {vocabulary_, channels_}, 1e-3F);
  HeadLoss head{
      .x = x, .weight = w, .targets = targets, .losses = {}, .gradient_scale = 0.37F, .dx = {}, .dweight = {}};
  Tensor losses_expected(DType::f32, {rows_}), dx_expected(dtype_, {rows_, channels_}), dw_expected = dw_before;
  head.losses = losses_expected;
  head.dx = dx_expected;
  head.dweight = dw_expected;
  reference::head_loss(head);
  std::vector<Tensor> first;
  for (const auto& arena : arenas()) {
    LentWorkspace workspace(fast::head_loss_scratch(rows_, channels_, vocabulary_, dtype_, arena->threads()));
    Tensor losses(DType::f32, {rows_}), dx(dtype_, {rows_, channels_}), dw = dw_before;
    head.losses = losses;
    head.dx = dx;
    head.dweight = dw;
    fast::head_loss(*arena, workspace.get(), head);
    EXPECT_CLOSE(losses, losses_expected);
    EXPECT_CLOSE(dx, dx_expected);
    EXPECT_CLOSE(dw, dw_expected);
    if (first.empty()) first = {losses, dx, dw};
    EXPECT_SAME_BITS(losses, first[0]);
    EXPECT_SAME_BITS(dx, first[1]);
    EXPECT_SAME_BITS(dw, first[2]);
    // Evaluation: the same losses without gradients.
    Tensor alone(DType::f32, {rows_});
    head.losses = alone;
    head.dx = {};
    head.dweight = {};
    fast::head_loss(*arena, workspace.get(), head);
    EXPECT_SAME_BITS(alone, losses);
  }
}

// One product over all rows: of few rows, which are one chunk, the sum that is added to otherwise.
TEST_P(HeadLossTest, AGradientOfTheWeightInBf16IsWrittenWhole) {
  Random random(5);
  const Tensor x = random.tensor(dtype_, {rows_, channels_}),
               w = random.tensor(DType::bf16, {vocabulary_, channels_}, 0.3F);
  Tensor targets = random.tokens({rows_}, static_cast<std::int32_t>(vocabulary_));
  if (rows_ > 1) targets.view().as<std::int32_t>()[1] = -1;
  const Tensor anything = random.tensor(DType::bf16, {vocabulary_, channels_});
  Tensor losses(DType::f32, {rows_}), dx(dtype_, {rows_, channels_}), summed(DType::f32, {vocabulary_, channels_});
  Tensor expected = anything, losses_again = losses, dx_again = dx;
  HeadLoss head{.x = x,
                .weight = w,
                .targets = targets,
                .losses = losses,
                .gradient_scale = 0.37F,
                .dx = dx,
                .dweight = expected};
  reference::head_loss(head);
  for (const auto& arena : arenas()) {
    LentWorkspace sums(fast::head_loss_scratch(rows_, channels_, vocabulary_, dtype_, arena->threads()));
    head.dweight = summed;
    std::fill_n(summed.view().as<float>(), vocabulary_ * channels_, 0.0F);
    fast::head_loss(*arena, sums.get(), head);
    LentWorkspace workspace(
        fast::head_loss_scratch(rows_, channels_, vocabulary_, dtype_, arena->threads(), vocabulary_));
    Tensor dw = anything;
    HeadLoss whole = head;
    whole.losses = losses_again;
    whole.dx = dx_again;
    whole.dweight = dw;
    fast::head_loss(*arena, workspace.get(), whole);
    EXPECT_CLOSE(dw, expected);
    EXPECT_SAME_BITS(losses_again, losses);
    EXPECT_SAME_BITS(dx_again, dx);
    if (fast::head_loss_rows(rows_, vocabulary_) < rows_) continue;
    EXPECT_SAME_BITS(dw, rounded(summed));
  }
}

// Logits are made once more for some rows of the weight at a time, to the same bits.
TEST_P(HeadLossTest, AGradientOfTheWeightInSlicesHasTheSameBits) {
  Random random(5);
  const Tensor x = random.tensor(dtype_, {rows_, channels_}),
               w = random.tensor(DType::bf16, {vocabulary_, channels_}, 0.3F);
  Tensor targets = random.tokens({rows_}, static_cast<std::int32_t>(vocabulary_));
  if (rows_ > 1) targets.view().as<std::int32_t>()[1] = -1;
  Tensor losses(DType::f32, {rows_}), dx(dtype_, {rows_, channels_}), dw(DType::bf16, {vocabulary_, channels_});
  HeadLoss head{
      .x = x, .weight = w, .targets = targets, .losses = losses, .gradient_scale = 0.37F, .dx = dx, .dweight = dw};
  const auto scratch = [&](Parallel& arena, std::int64_t written) {
    return LentWorkspace(fast::head_loss_scratch(rows_, channels_, vocabulary_, dtype_, arena.threads(), written));
  };
  fast::head_loss(*arenas()[0], scratch(*arenas()[0], vocabulary_).get(), head);
  for (const std::int64_t at_once : {vocabulary_ / 3, vocabulary_ - 1, vocabulary_}) {
    SCOPED_TRACE(at_once);
    for (const auto& arena : arenas()) {
      Tensor losses_again(DType::f32, {rows_}), dx_again(dtype_, {rows_, channels_});
      Tensor dw_again = random.tensor(DType::bf16, {vocabulary_, channels_}), alone = dw_again;
      LentWorkspace workspace = scratch(*arena, at_once);
      HeadLoss slices = head;
      slices.losses = losses_again;
      slices.dx = dx_again;
      slices.dweight = dw_again;
      slices.rows_at_once = at_once;
      fast::head_loss(*arena, workspace.get(), slices);
      EXPECT_SAME_BITS(losses_again, losses);
      EXPECT_SAME_BITS(dx_again, dx);
      EXPECT_SAME_BITS(dw_again, dw);
      slices.dx = {};
      slices.dweight = alone;
      fast::head_loss(*arena, workspace.get(), slices);
      EXPECT_SAME_BITS(alone, dw);
    }
  }
}

// Gradient of a weight that is the embedding table too, with more tokens than the vocabulary has, and with fewer.
TEST_P(HeadLossTest, RowsOfTokensAreThoseOfTheWeightBeforeTheyAreRounded) {
  Random random(5);
  const Tensor x = random.tensor(dtype_, {rows_, channels_}),
               w = random.tensor(DType::bf16, {vocabulary_, channels_}, 0.3F);
  const Tensor targets = random.tokens({rows_}, static_cast<std::int32_t>(vocabulary_));
  const Tensor tokens = random.tokens({rows_}, static_cast<std::int32_t>(std::min<std::int64_t>(vocabulary_, 40)));
  Tensor losses(DType::f32, {rows_}), dx(dtype_, {rows_, channels_}), dw(DType::bf16, {vocabulary_, channels_});
  Tensor alone = dw, expected(DType::f32, {rows_, channels_});
  HeadLoss head{
      .x = x, .weight = w, .targets = targets, .losses = losses, .gradient_scale = 0.37F, .dx = dx, .dweight = dw};
  HeadLoss with_rows = head;
  with_rows.tokens = tokens;
  with_rows.token_rows = expected;
  reference::head_loss(with_rows);
  for (const auto& arena : arenas()) {
    const auto scratch = [&](bool token_rows) {
      return fast::head_loss_scratch(rows_, channels_, vocabulary_, dtype_, arena->threads(), vocabulary_, token_rows);
    };
    LentWorkspace less(scratch(false)), workspace(scratch(true));
    head.dweight = alone;
    fast::head_loss(*arena, less.get(), head);
    Tensor of_tokens = random.tensor(DType::f32, {rows_, channels_});
    with_rows.token_rows = of_tokens;
    fast::head_loss(*arena, workspace.get(), with_rows);
    EXPECT_CLOSE(of_tokens, expected);
    EXPECT_SAME_BITS(dw, alone);
    Tensor again = random.tensor(DType::f32, {rows_, channels_}),
           dw_again = random.tensor(DType::bf16, {vocabulary_, channels_});
    HeadLoss of_weight = with_rows;
    of_weight.dx = {};
    of_weight.dweight = dw_again;
    of_weight.token_rows = again;
    fast::head_loss(*arena, workspace.get(), of_weight);
    EXPECT_SAME_BITS(dw_again, dw);
    EXPECT_SAME_BITS(again, of_tokens);
    // Here a row's product has the same order of sums, whichever rows are made beside it.
    const Tensor rows_rounded = rounded(of_tokens);
    for (std::int64_t i = 0; i < rows_ * channels_; ++i) {
      const std::int64_t token = tokens.view().as<std::int32_t>()[i / channels_];
      ASSERT_EQ(rows_rounded.get(i), dw.get(token * channels_ + i % channels_)) << i;
    }
  }
}

TEST(HeadLossRows, DependOnTokensAndVocabularyAndStayBelowTheLimit) {
  for (const std::int64_t vocabulary : {1, 101, 50257, 128256, 10000000}) {
    for (const std::int64_t tokens : {1, 7, 512, 513, 100000}) {
      const std::int64_t rows = fast::head_loss_rows(tokens, vocabulary);
      EXPECT_GE(rows, 1);
      EXPECT_LE(rows, tokens);
      EXPECT_TRUE(rows == 1 || rows * vocabulary * 4 <= 32 << 20) << rows << " rows of " << vocabulary;
    }
  }
}

TEST(HeadLossChecks, ATokenOutsideTheVocabularyThrows) {
  Random random(6);
  const Tensor x = random.tensor(DType::f32, {2, 8}), w = random.tensor(DType::bf16, {11, 8});
  Tensor targets(DType::i32, {2}), tokens(DType::i32, {2}), losses(DType::f32, {2}), dx(DType::f32, {2, 8});
  Tensor dw(DType::bf16, {11, 8}), of_tokens(DType::f32, {2, 8});
  LentWorkspace workspace(1 << 20);
  for (const std::int32_t wrong : {11, -1}) {
    tokens.view().as<std::int32_t>()[1] = wrong;
    EXPECT_THROW(
        fast::head_loss(*arenas()[0], workspace.get(), {x, w, targets, losses, 1.0F, dx, dw, {}, tokens, of_tokens}),
        MisuseError);
  }
}

TEST(HeadLossChecks, ATargetBeyondTheVocabularyThrows) {
  Random random(6);
  const Tensor x = random.tensor(DType::f32, {2, 8}), w = random.tensor(DType::bf16, {11, 8});
  Tensor targets(DType::i32, {2}), losses(DType::f32, {2});
  targets.view().as<std::int32_t>()[1] = 11;
  LentWorkspace workspace(1 << 20);
  HeadLoss head{
      .x = x, .weight = w, .targets = targets, .losses = losses, .gradient_scale = 1.0F, .dx = {}, .dweight = {}};
  EXPECT_THROW(fast::head_loss(*arenas()[0], workspace.get(), head), MisuseError);
}

INSTANTIATE_TEST_SUITE_P(Activations, Linear, ::testing::Values(DType::f32, DType::bf16), dtype_name);
INSTANTIATE_TEST_SUITE_P(Activations, HeadLossTest,
                         ::testing::Combine(::testing::Values(DType::f32, DType::bf16),
                                            ::testing::ValuesIn(head_sizes)),
                         head_name);

}  // namespace
}  // namespace tandem::testing
