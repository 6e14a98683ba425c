// Choices and products of experts: against the reference, on all thread counts, which give the same bits.
#include "cpu_ops/kernels/kernels.hpp"
#include "cpu_ops/reference/reference.hpp"
#include "tests/cpu_ops/expert_testing.hpp"

namespace tandem::testing {
namespace {

// Odd ones, one expert, all of them, more experts than rows, and one whose experts have several blocks of rows.
constexpr ExpertSizes all_sizes[] = {{1, 1, 1, 1, 1},   {22, 5, 2, 24, 55},  {7, 3, 3, 52, 33},
                                     {5, 60, 2, 33, 7}, {55, 8, 1, 200, 24}, {1300, 3, 2, 17, 40}};

class Experts : public ::testing::TestWithParam<DType> {
 protected:
  DType dtype() const { return GetParam(); }
};

/// Runs `kernel(arena, workspace, result)` on every thread count; `make` gives fresh results, all must come out alike.
template <class Make, class Kernel>
auto on_all_threads(const ExpertSizes& s, const Make& make, const Kernel& kernel) {
  auto first = make();
  bool have = false;
  for (const auto& arena : arenas()) {
    const std::int64_t widest = std::max(s.channels, s.inner);
    LentWorkspace workspace(fast::expert_scratch(s.tokens, widest, widest, arena->threads()));
    auto result = make();
    kernel(*arena, workspace.get(), result);
    EXPECT_TRUE(result.intact());
    if (have) {
      EXPECT_SAME_BITS(result, first) << arena->threads() << " threads";
    }
    first = result;
    have = true;
  }
  return first;
}

TEST(ExpertChoice, IsTheReference) {
  for (const ExpertSizes& s : all_sizes) {
    for (const bool normalized : {false, true}) {
      SCOPED_TRACE(s.tokens);
      const Tensor logits = logits_of(s, 1);
      const Routed<Tensor> expected = routed(s, logits, normalized);
      for (const auto& arena : arenas()) {
        Routed<Tensor> r = room_for(s);
        fast::route(*arena, logits, normalized, r);
        EXPECT_EQ(r.experts.bytes(), expected.experts.bytes());
        EXPECT_EQ(r.begins.bytes(), expected.begins.bytes());
        EXPECT_EQ(r.slots.bytes(), expected.slots.bytes());
        EXPECT_EQ(r.rows.bytes(), expected.rows.bytes());
        EXPECT_CLOSE(r.weights, expected.weights);
      }
    }
  }
}

TEST(ExpertChoice, RowsAreTheSlotsSortedByExpert) {
  for (const ExpertSizes& s : all_sizes) {
    Routed<Tensor> r = room_for(s);
    fast::route(*arenas().back(), logits_of(s, 2), true, r);
    EXPECT_EQ(at(r.begins, 0), 0);
    EXPECT_EQ(at(r.begins, s.experts), s.tokens * s.choices);
    for (std::int64_t e = 0; e < s.experts; ++e) {
      for (std::int64_t row = at(r.begins, e); row < at(r.begins, e + 1); ++row) {
        EXPECT_EQ(at(r.experts, at(r.slots, row)), e);
        EXPECT_EQ(at(r.rows, at(r.slots, row)), row);
        if (row > at(r.begins, e)) {
          EXPECT_GT(at(r.slots, row), at(r.slots, row - 1));
        }
      }
    }
  }
}

TEST(ExpertChoice, IsOfDifferentExpertsWhateverTheLogits) {
  const OddLogits odd;
  for (const bool normalized : {false, true}) {
    Routed<Tensor> r = room_for(OddLogits::sizes);
    fast::route(*arenas().back(), odd.logits, normalized, r);
    EXPECT_SAME_BITS(r.experts, odd.chosen);
    EXPECT_TRUE(std::isnan(r.weights.get(3)));  // a NaN is not hidden
  }
}

TEST_P(Experts, GradientsOfLogitsAreTheReference) {
  for (const ExpertSizes& s : all_sizes) {
    for (const bool normalized : {false, true}) {
      const Tensor logits = logits_of(s, 3);
      const Routed<Tensor> r = routed(s, logits, normalized);
      const Tensor drouting_weights = Random(4).tensor(DType::f32, {s.tokens, s.choices});
      Tensor expected(dtype(), {s.tokens, s.experts});
      reference::route_backward(drouting_weights, logits, normalized, r, expected);
      const Tensor dlogits = on_all_threads(
          s,
          [&] {
            return Tensor(dtype(), {s.tokens, s.experts});
          },
          [&](Parallel& p, const fast::Workspace&, Tensor& out) {
            fast::route_backward(p, drouting_weights, logits, normalized, r, out);
          });
      EXPECT_CLOSE(dlogits, expected);
    }
  }
}

/// The softmax's own derivative, by differences in double.
TEST(ExpertChoice, GradientsOfLogitsAreDifferences) {
  const ExpertSizes s{4, 6, 3, 1, 1};
  for (const bool normalized : {false, true}) {
    const Tensor logits = Random(5).tensor(DType::f32, {s.tokens, s.experts});
    const Routed<Tensor> r = routed(s, logits, normalized);
    const Tensor drouting_weights = Random(6).tensor(DType::f32, {s.tokens, s.choices});
    Tensor dlogits(DType::f32, {s.tokens, s.experts});
    reference::route_backward(drouting_weights, logits, normalized, r, dlogits);
    const auto objective = [&](const Tensor& at) {
      const Routed<Tensor> moved = routed(s, at, normalized);
      EXPECT_EQ(moved.experts.bytes(), r.experts.bytes());
      double sum = 0.0;
      for (std::int64_t i = 0; i < drouting_weights.count(); ++i) sum += drouting_weights.get(i) * moved.weights.get(i);
      return sum;
    };
    for (std::int64_t i = 0; i < logits.count(); ++i) {
      constexpr float h = 1e-3F;
      Tensor up = logits, down = logits;
      up.set(i, static_cast<float>(logits.get(i)) + h);
      down.set(i, static_cast<float>(logits.get(i)) - h);
      EXPECT_NEAR((objective(up) - objective(down)) / (up.get(i) - down.get(i)), dlogits.get(i), 2e-4) << i;
    }
  }
}

TEST_P(Experts, ForwardIsTheReference) {
  for (const ExpertSizes& s : all_sizes) {
    for (const bool of_tokens : {false, true}) {
      SCOPED_TRACE(s.tokens);
      const Routed<Tensor> r = routed(s, logits_of(s, 7));
      Random random(8);
      const std::int64_t rows = s.tokens * s.choices;
      const Tensor x = random.tensor(dtype(), {of_tokens ? s.tokens : rows, s.channels});
      const Tensor w = random.tensor(DType::bf16, {s.experts, s.inner, s.channels});
      Tensor expected(dtype(), {rows, s.inner});
      reference::expert_linear({x, of_tokens}, w, r, expected);
      const Tensor y = on_all_threads(
          s,
          [&] {
            return Tensor(dtype(), {rows, s.inner});
          },
          [&](Parallel& p, const fast::Workspace& lent, Tensor& out) {
            fast::expert_linear(p, lent, {x, of_tokens}, w, r, out);
          });
      EXPECT_CLOSE(y, expected);
    }
  }
}

TEST_P(Experts, BackwardOfTheInputIsTheReference) {
  for (const ExpertSizes& s : all_sizes) {
    for (const bool of_tokens : {false, true}) {
      for (const bool accumulate : {false, true}) {
        SCOPED_TRACE(s.tokens);
        const Routed<Tensor> r = routed(s, logits_of(s, 9));
        Random random(10);
        const std::int64_t rows = s.tokens * s.choices;
        const Tensor dy = random.tensor(dtype(), {of_tokens ? s.tokens : rows, s.inner});
        const Tensor w = random.tensor(DType::bf16, {s.experts, s.inner, s.channels});
        const Tensor before = random.tensor(dtype(), {rows, s.channels});
        Tensor expected = before;
        reference::expert_backward_input({dy, of_tokens}, w, r, expected, accumulate);
        const Tensor dx = on_all_threads(
            s, [&] { return before; },
            [&](Parallel& p, const fast::Workspace& lent, Tensor& out) {
              fast::expert_backward_input(p, lent, {dy, of_tokens}, w, r, out, accumulate);
            });
        EXPECT_CLOSE(dx, expected);
      }
    }
  }
}

TEST_P(Experts, BackwardOfTheWeightIsTheReference) {
  for (const ExpertSizes& s : all_sizes) {
    for (const bool dy_of_tokens : {false, true}) {
      for (const DType result : {DType::f32, DType::bf16}) {
        SCOPED_TRACE(s.tokens);
        const Routed<Tensor> r = routed(s, logits_of(s, 11));
        Random random(12);
        const std::int64_t rows = s.tokens * s.choices;
        const Tensor dy = random.tensor(dtype(), {dy_of_tokens ? s.tokens : rows, s.inner});
        const Tensor x = random.tensor(dtype(), {dy_of_tokens ? rows : s.tokens, s.channels});
        const RowValues dys{dy, dy_of_tokens}, xs{x, !dy_of_tokens};
        const Tensor before = random.tensor(result, {s.experts, s.inner, s.channels});
        Tensor expected = before;
        reference::expert_backward_weight(dys, xs, r, expected);
        const Tensor dw = on_all_threads(
            s, [&] { return before; },
            [&](Parallel& p, const fast::Workspace& lent, Tensor& out) {
              fast::expert_backward_weight(p, lent, dys, xs, r, out);
            });
        EXPECT_CLOSE(dw, expected);
      }
    }
  }
}

TEST_P(Experts, ActivationIsTheReference) {
  for (const ExpertSizes& s : all_sizes) {
    const Routed<Tensor> r = routed(s, logits_of(s, 13));
    Random random(14);
    const Shape shape{s.tokens * s.choices, s.inner};
    const Tensor gate = random.tensor(dtype(), shape), up = random.tensor(dtype(), shape);
    Tensor expected(dtype(), shape);
    reference::expert_swiglu(gate, up, r, expected);
    const Tensor y = on_all_threads(
        s, [&] { return Tensor(dtype(), shape); },
        [&](Parallel& p, const fast::Workspace&, Tensor& out) { fast::expert_swiglu(p, gate, up, r, out); });
    EXPECT_CLOSE(y, expected);

    const Tensor dy = random.tensor(dtype(), shape);
    Tensor dgate(dtype(), shape), dup(dtype(), shape), drouting_weights(DType::f32, {s.tokens, s.choices});
    reference::expert_swiglu_backward(dy, gate, up, r, dgate, dup, drouting_weights);
    for (const auto& arena : arenas()) {
      Tensor of_gate = gate, of_up = up, of_routing_weights(DType::f32, {s.tokens, s.choices});  // in place
      fast::expert_swiglu_backward(*arena, dy, of_gate, of_up, r, of_gate, of_up, of_routing_weights);
      EXPECT_CLOSE(of_gate, dgate);
      EXPECT_CLOSE(of_up, dup);
      EXPECT_CLOSE(of_routing_weights, drouting_weights);
    }
  }
}

TEST_P(Experts, SumsOfRowsAreTheReference) {
  for (const ExpertSizes& s : all_sizes) {
    for (const bool with_residual : {false, true}) {
      const Routed<Tensor> r = routed(s, logits_of(s, 15));
      Random random(16);
      const Tensor x = random.tensor(dtype(), {s.tokens * s.choices, s.channels});
      const Tensor residual = random.tensor(dtype(), {s.tokens, s.channels});
      Tensor expected(dtype(), {s.tokens, s.channels});
      reference::sum_rows(x, r, with_residual ? residual.view() : TensorView{}, expected);
      const Tensor y = on_all_threads(
          s, [&] { return residual; },
          [&](Parallel& p, const fast::Workspace&, Tensor& out) {
            fast::sum_rows(p, x, r, with_residual ? out.view() : TensorView{}, out);  // in place
          });
      EXPECT_CLOSE(y, expected);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, Experts, ::testing::Values(DType::f32, DType::bf16), dtype_name);

}  // namespace
}  // namespace tandem::testing
