// Choices and products of experts against the reference.
#include "cpu_ops/reference/reference.hpp"
#include "tests/cpu_ops/expert_testing.hpp"
#include "tests/gpu_ops/kernels/bench.hpp"

namespace tandem::testing {
namespace {

// Ones, more experts than rows, odd ones, several steps of the sums, every expert of each token, and experts with
// several tiles of rows in every direction.
constexpr ExpertSizes all_sizes[] = {{1, 1, 1, 1, 1},    {5, 60, 2, 24, 52},   {22, 3, 1, 52, 1},  {55, 8, 2, 64, 200},
                                     {7, 8, 8, 201, 24}, {150, 2, 2, 40, 136}, {111, 3, 1, 72, 67}};

Routed<Operand> put(const Routed<Tensor>& r, std::size_t offset = 0) {
  return {bench().put(r.experts, offset), bench().put(r.weights, offset), bench().put(r.begins, offset),
          bench().put(r.slots, offset), bench().put(r.rows, offset)};
}

/// Members of `r` in their order.
std::vector<Tensor> get(const Routed<Operand>& r) {
  return {bench().get(r.experts), bench().get(r.weights), bench().get(r.begins), bench().get(r.slots),
          bench().get(r.rows)};
}

/// All tokens to one expert, the last or, of several, also to the first ones.
Tensor logits_of_one(const ExpertSizes& s) {
  Tensor logits(DType::f32, {s.tokens, s.experts});
  for (std::int64_t n = 0; n < s.tokens; ++n) logits.set((n + 1) * s.experts - 1, 1.0F);
  return logits;
}

class ExpertOps : public OpsTest {
 protected:
  /// Calls body(sizes, routing, offset) for every size, all tokens with one expert, and each alignment.
  template <class Body>
  void everywhere(const Body& body) {
    const auto traced = [&](const ExpertSizes& s, const Tensor& logits, std::size_t offset) {
      SCOPED_TRACE(s.text() + " at " + std::to_string(offset));
      bench().lend({.tokens = s.tokens,
                    .channels = std::max(s.channels, s.inner),
                    .activations = dtype(),
                    .experts = s.experts});
      body(s, routed(s, logits), offset);
    };
    for (const ExpertSizes& s : all_sizes) traced(s, logits_of(s, 1), 0);
    const ExpertSizes several{37, 5, 2, 64, 24};
    traced(several, logits_of_one(several), 0);
    for (const std::size_t offset : offsets(dtype())) traced({5, 3, 2, 48, 40}, logits_of({5, 3, 2}, 2), offset);
  }
  Tensor random(unsigned seed, std::int64_t rows, std::int64_t channels) const {
    return Random(seed).tensor(dtype(), {rows, channels});
  }
};

void expect_same_rows(const std::vector<Tensor>& actual, const Routed<Tensor>& expected) {
  EXPECT_SAME_BITS(actual[0], expected.experts);
  EXPECT_WITHIN(actual[1], expected.weights, DType::f32, false);
  EXPECT_SAME_BITS(actual[2], expected.begins);
  EXPECT_SAME_BITS(actual[3], expected.slots);
  EXPECT_SAME_BITS(actual[4], expected.rows);
}

// -- the choice ----------------------------------------------------------------------------------------------------

class ExpertChoice : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = bench().why_not(); !why.empty()) GTEST_SKIP() << why;
  }
  std::vector<Tensor> chosen(const ExpertSizes& s, const Tensor& logits, bool normalized) {
    return under_all_schedules([&] {
      const Operand l = bench().put(logits, 4);
      const Routed<Operand> r = put(room_for(s), 4);
      bench().ops().route(l, normalized, r, bench().stream());
      return get(r);
    });
  }
};

TEST_F(ExpertChoice, IsTheReference) {
  // More slots than a block's warps look at together, and more experts and choices than a warp has lanes.
  for (const ExpertSizes& s : {ExpertSizes{1, 1, 1}, ExpertSizes{5, 60, 2}, ExpertSizes{7, 8, 8}, ExpertSizes{55, 3, 1},
                               ExpertSizes{1030, 3, 2}, ExpertSizes{6, 70, 40}}) {
    for (const bool normalized : {false, true}) {
      SCOPED_TRACE(s.text());
      const Tensor logits = logits_of(s, 1);
      expect_same_rows(chosen(s, logits, normalized), routed(s, logits, normalized));
    }
  }
}

TEST_F(ExpertChoice, OfEqualLogitsIsOfTheFirst) {
  const ExpertSizes s{70, 40, 3};
  expect_same_rows(chosen(s, logits_of_one(s), false), routed(s, logits_of_one(s), false));
}

TEST_F(ExpertChoice, IsOfDifferentExpertsWhateverTheLogits) {
  const OddLogits odd;
  for (const bool normalized : {false, true}) {
    const std::vector<Tensor> r = chosen(OddLogits::sizes, odd.logits, normalized);
    EXPECT_SAME_BITS(r[0], odd.chosen);
    EXPECT_TRUE(std::isnan(r[1].get(3)));  // a NaN is not hidden
    EXPECT_EQ(at(r[2], 5), 18);
  }
}

TEST_F(ExpertChoice, OfNoTokensBeginsWithNothing) {
  const ExpertSizes s{0, 3, 2};
  const std::vector<Tensor> r = chosen(s, Tensor(DType::f32, {0, 3}), true);
  for (std::int64_t e = 0; e <= s.experts; ++e) EXPECT_EQ(at(r[2], e), 0);
}

TEST_P(ExpertOps, GradientsOfLogitsAreTheReference) {
  for (const ExpertSizes& s : {ExpertSizes{1, 1, 1}, ExpertSizes{5, 60, 2}, ExpertSizes{7, 8, 8}, ExpertSizes{55, 3, 1},
                               ExpertSizes{6, 70, 40}}) {
    for (const bool normalized : {false, true}) {
      SCOPED_TRACE(s.text());
      const Tensor logits = logits_of(s, 3), drouting_weights = Random(4).tensor(DType::f32, {s.tokens, s.choices});
      const Routed<Tensor> r = routed(s, logits, normalized);
      Tensor expected(dtype(), {s.tokens, s.experts});
      reference::route_backward(drouting_weights, logits, normalized, r, expected);
      const auto results = under_all_schedules([&] {
        const Operand d = bench().put(drouting_weights), l = bench().put(logits);
        const Operand dlogits = bench().put(random(5, s.tokens, s.experts));
        ops().route_backward(d, l, normalized, put(r), dlogits, stream());
        return std::vector<Tensor>{bench().get(dlogits)};
      });
      EXPECT_WITHIN(results[0], expected, dtype(), false);
    }
  }
}

// -- products ------------------------------------------------------------------------------------------------------

TEST_P(ExpertOps, ForwardIsTheReference) {
  everywhere([&](const ExpertSizes& s, const Routed<Tensor>& r, std::size_t offset) {
    for (const bool of_tokens : {false, true}) {
      const Tensor x = random(6, of_tokens ? s.tokens : s.rows(), s.channels);
      const Tensor w = Random(7).tensor(DType::bf16, {s.experts, s.inner, s.channels});
      Tensor expected(dtype(), {s.rows(), s.inner});
      reference::expert_linear({x, of_tokens}, w, r, expected);
      const auto results = under_all_schedules([&] {
        const Operand in = bench().put(x, offset), weight = bench().put(w, offset);
        const Operand y = bench().put(Tensor(dtype(), {s.rows(), s.inner}), offset);
        ops().expert_linear({in, of_tokens}, weight, put(r), y, stream());
        return std::vector<Tensor>{bench().get(y)};
      });
      EXPECT_WITHIN(results[0], expected, dtype(), false);
    }
  });
}

TEST_P(ExpertOps, BackwardOfTheInputIsTheReference) {
  everywhere([&](const ExpertSizes& s, const Routed<Tensor>& r, std::size_t offset) {
    for (const bool of_tokens : {false, true}) {
      const Tensor dy = random(8, of_tokens ? s.tokens : s.rows(), s.inner);
      const Tensor w = Random(9).tensor(DType::bf16, {s.experts, s.inner, s.channels});
      const Tensor before = random(10, s.rows(), s.channels);
      Tensor written = before, added = before;
      reference::expert_backward_input({dy, of_tokens}, w, r, written, false);
      reference::expert_backward_input({dy, of_tokens}, w, r, added, true);
      const auto results = under_all_schedules([&] {
        const Operand d = bench().put(dy, offset), weight = bench().put(w, offset);
        const Operand dx = bench().put(before, offset), sum = bench().put(before, offset);
        ops().expert_backward_input({d, of_tokens}, weight, put(r), dx, false, stream());
        ops().expert_backward_input({d, of_tokens}, weight, put(r), sum, true, stream());
        return std::vector<Tensor>{bench().get(dx), bench().get(sum)};
      });
      EXPECT_WITHIN(results[0], written, dtype(), false);
      EXPECT_WITHIN(results[1], added, dtype(), false);
    }
  });
}

// An fp32 gradient is added to, a bf16 one is written.
TEST_P(ExpertOps, BackwardOfTheWeightIsTheReference) {
  everywhere([&](const ExpertSizes& s, const Routed<Tensor>& r, std::size_t offset) {
    for (const bool dy_of_tokens : {false, true}) {
      const Tensor dy = random(11, dy_of_tokens ? s.tokens : s.rows(), s.inner);
      const Tensor x = random(12, dy_of_tokens ? s.rows() : s.tokens, s.channels);
      const RowValues dys{dy, dy_of_tokens}, xs{x, !dy_of_tokens};
      const Shape shape{s.experts, s.inner, s.channels};
      const Tensor sums_before = Random(13).tensor(DType::f32, shape), anything = rounded(sums_before);
      Tensor sums = sums_before, written = anything;
      reference::expert_backward_weight(dys, xs, r, sums);
      reference::expert_backward_weight(dys, xs, r, written);
      const auto results = under_all_schedules([&] {
        const Operand d = bench().put(dy, offset), in = bench().put(x, offset);
        const Operand f32 = bench().put(sums_before, offset / 4 * 4), bf16 = bench().put(anything, offset);
        ops().expert_backward_weight({d, dy_of_tokens}, {in, !dy_of_tokens}, put(r), f32, stream());
        ops().expert_backward_weight({d, dy_of_tokens}, {in, !dy_of_tokens}, put(r), bf16, stream());
        return std::vector<Tensor>{bench().get(f32), bench().get(bf16)};
      });
      EXPECT_WITHIN(results[0], sums, dtype(), false);
      EXPECT_WITHIN(results[1], written, dtype(), false);
    }
  });
}

TEST_P(ExpertOps, WhatIsNotANumberStaysInItsRowAndItsExpert) {
  const ExpertSizes s{37, 3, 1, 24, 40};
  bench().lend({.tokens = s.tokens, .channels = 40, .activations = dtype(), .experts = s.experts});
  const Routed<Tensor> r = routed(s, logits_of(s, 1));
  Tensor x = random(6, s.tokens, s.channels);
  constexpr std::int64_t token = 20;
  for (std::int64_t c = 0; c < s.channels; ++c) x.set(token * s.channels + c, c % 2 == 0 ? NAN : INFINITY);
  const Operand in = bench().put(x), w = bench().put(Random(7).tensor(DType::bf16, {3, s.inner, s.channels}));
  const Operand dy = bench().put(random(8, s.rows(), s.inner)), dw = bench().put(Tensor(DType::f32, w.view().shape));
  const Operand y = bench().put(Tensor(dtype(), {s.rows(), s.inner}));
  ops().expert_linear({in, true}, w, put(r), y, stream());
  ops().expert_backward_weight({dy, false}, {in, true}, put(r), dw, stream());
  const Tensor of_rows = bench().get(y), of_experts = bench().get(dw);
  for (std::int64_t i = 0; i < of_rows.count(); ++i) {
    EXPECT_EQ(std::isfinite(of_rows.get(i)), at(r.slots, i / s.inner) != token) << i;
  }
  const std::int64_t each = s.inner * s.channels;
  for (std::int64_t i = 0; i < of_experts.count(); ++i) {
    EXPECT_EQ(std::isfinite(of_experts.get(i)), i / each != at(r.experts, token)) << i;
  }
}

// The weights are more tiles than a launch has blocks: some blocks have one of two experts with rows.
TEST_P(ExpertOps, OfMoreExpertsThanBlocksAllWeightsAreWritten) {
  const ExpertSizes s{4, 8200, 2, 5, 3};
  bench().lend({.tokens = s.tokens, .channels = 5, .activations = dtype(), .experts = s.experts});
  Tensor logits(DType::f32, {s.tokens, s.experts});
  for (std::int64_t n = 0; n < s.tokens; ++n) {
    logits.set(n * s.experts + n % 2, 2.0F);
    logits.set(n * s.experts + 8192 + n % 2, 1.0F);
  }
  const Routed<Tensor> r = routed(s, logits);
  const Tensor dy = random(11, s.rows(), s.inner), x = random(12, s.tokens, s.channels);
  const Tensor anything = Random(13).tensor(DType::bf16, {s.experts, s.inner, s.channels});
  Tensor expected = anything;
  reference::expert_backward_weight({dy, false}, {x, true}, r, expected);
  const Operand d = bench().put(dy), in = bench().put(x), dw = bench().put(anything);
  ops().expert_backward_weight({d, false}, {in, true}, put(r), dw, stream());
  EXPECT_WITHIN(bench().get(dw), expected, dtype(), false);
}

// -- rows ----------------------------------------------------------------------------------------------------------

TEST_P(ExpertOps, ActivationIsTheReferenceAlsoInPlace) {
  everywhere([&](const ExpertSizes& s, const Routed<Tensor>& r, std::size_t offset) {
    const Shape shape{s.rows(), s.inner};
    const Tensor gate = random(14, s.rows(), s.inner), up = random(15, s.rows(), s.inner);
    const Tensor dy = random(16, s.rows(), s.inner);
    Tensor y(dtype(), shape), dgate(dtype(), shape), dup(dtype(), shape),
        drouting_weights(DType::f32, {s.tokens, s.choices});
    reference::expert_swiglu(gate, up, r, y);
    reference::expert_swiglu_backward(dy, gate, up, r, dgate, dup, drouting_weights);
    const auto results = under_all_schedules([&] {
      const Operand g = bench().put(gate, offset), u = bench().put(up, offset), d = bench().put(dy, offset);
      const Operand out = bench().put(Tensor(dtype(), shape), offset), dg = bench().put(gate, offset);
      const Operand du = bench().put(gate, offset), ds = bench().put(r.weights), again = bench().put(r.weights);
      ops().expert_swiglu(g, u, put(r), out, stream());
      ops().expert_swiglu_backward(d, g, u, put(r), dg, du, ds, stream());
      ops().expert_swiglu_backward(d, g, u, put(r), g, u, again, stream());
      return std::vector<Tensor>{bench().get(out), bench().get(dg), bench().get(du),   bench().get(ds),
                                 bench().get(g),   bench().get(u),  bench().get(again)};
    });
    EXPECT_WITHIN(results[0], y, dtype(), false);
    EXPECT_WITHIN(results[1], dgate, dtype(), false);
    EXPECT_WITHIN(results[2], dup, dtype(), false);
    EXPECT_WITHIN(results[3], drouting_weights, dtype(), false);
    for (std::size_t i = 1; i < 4; ++i) EXPECT_SAME_BITS(results[i + 3], results[i]);
  });
}

TEST_P(ExpertOps, SumsOfRowsAreTheReferenceAlsoInPlace) {
  everywhere([&](const ExpertSizes& s, const Routed<Tensor>& r, std::size_t offset) {
    const Tensor x = random(17, s.rows(), s.channels), residual = random(18, s.tokens, s.channels);
    Tensor with(dtype(), {s.tokens, s.channels}), without = with;
    reference::sum_rows(x, r, residual, with);
    reference::sum_rows(x, r, {}, without);
    const auto results = under_all_schedules([&] {
      const Operand in = bench().put(x, offset), before = bench().put(residual, offset);
      const Operand y = bench().put(residual, offset), other = bench().put(residual, offset);
      const Operand alone = bench().put(residual, offset);
      ops().sum_rows(in, put(r), before, other, stream());
      ops().sum_rows(in, put(r), y, y, stream());
      ops().sum_rows(in, put(r), {}, alone, stream());
      return std::vector<Tensor>{bench().get(other), bench().get(y), bench().get(alone)};
    });
    EXPECT_WITHIN(results[0], with, dtype(), false);
    EXPECT_SAME_BITS(results[1], results[0]);
    EXPECT_WITHIN(results[2], without, dtype(), false);
  });
}

INSTANTIATE_TEST_SUITE_P(Activations, ExpertOps, ::testing::Values(DType::f32, DType::bf16), dtype_name);

}  // namespace
}  // namespace tandem::testing
