// Activations, sums, rotations and embeddings by GPU kernels are their formulas.
#include "cpu_ops/reference/reference.hpp"
#include "tests/cpu_ops/packed_records.hpp"
#include "tests/gpu_ops/kernels/bench.hpp"

namespace tandem::testing {
namespace {

const Shape pointwise_shapes[] = {{1, 1}, {1, 22}, {5, 11}, {55, 1001}};

/// Wide values, with zeros, infinities, denormals and a NaN among them.
Tensor wide(Random& random, DType dtype, const Shape& shape) {
  Tensor t = random.tensor(dtype, shape, 4.0F);
  const float special[] = {0.0F, -0.0F, INFINITY, -INFINITY, 1e-41F, -1e-41F, 1e30F, -1e30F, NAN, 0.3F, 100.0F};
  for (std::int64_t i = 0; i < std::min<std::int64_t>(11, t.count() - 1); ++i) t.set(i + 1, special[i]);
  return t;
}

/// The formulas are the same sequence of roundings everywhere: equal, not close (any NaN equals any NaN).
void expect_equal(const Tensor& actual, const Tensor& expected) {
  for (std::int64_t i = 0; i < expected.count(); ++i) {
    const double a = actual.get(i), e = expected.get(i);
    ASSERT_TRUE((std::isnan(a) && std::isnan(e)) || (a == e && std::signbit(a) == std::signbit(e)))
        << i << ": " << a << " for " << e;
  }
  EXPECT_TRUE(actual.intact());
}

/// Ids, two of which no vocabulary of this size has.
Tensor with_strangers(Tensor ids, std::int64_t vocabulary) {
  ids.view().as<std::int32_t>()[5] = -1;
  ids.view().as<std::int32_t>()[6] = static_cast<std::int32_t>(vocabulary);
  return ids;
}

class PointwiseOps : public OpsTest {
 protected:
  /// Calls body(shape, offset) for every shape and alignment.
  template <class Body>
  void everywhere(const Body& body) {
    for (const Shape& shape : pointwise_shapes) {
      for (const std::size_t offset : offsets(dtype())) {
        SCOPED_TRACE(shape.text() + " at " + std::to_string(offset));
        body(shape, offset);
      }
    }
  }
};

TEST_P(PointwiseOps, GeluIsTheFormulaAlsoInPlace) {
  everywhere([&](const Shape& shape, std::size_t offset) {
    Random random(1);
    const Tensor x = wide(random, dtype(), shape), dy = random.tensor(dtype(), shape);
    Tensor y_expected(dtype(), shape), dx_expected(dtype(), shape);
    reference::gelu(x, y_expected);
    reference::gelu_backward(dy, x, dx_expected);
    const auto results = under_all_schedules([&] {
      const Operand in = bench().put(x, offset), y = bench().put(Tensor(dtype(), shape), offset);
      const Operand dx = bench().put(dy, offset);
      ops().gelu(in, y, stream());
      ops().gelu_backward(dx, in, dx, stream());
      return std::vector<Tensor>{bench().get(y), bench().get(dx)};
    });
    expect_equal(results[0], y_expected);
    expect_equal(results[1], dx_expected);
  });
}

TEST_P(PointwiseOps, ActivationsWithAGateAreTheFormulaAlsoInPlace) {
  everywhere([&](const Shape& shape, std::size_t offset) {
    Random random(2);
    const Tensor gate = wide(random, dtype(), shape), up = random.tensor(dtype(), shape);
    const Tensor dy = random.tensor(dtype(), shape);
    std::vector<Tensor> expected(6, Tensor(dtype(), shape));
    reference::swiglu(gate, up, expected[0]);
    reference::swiglu_backward(dy, gate, up, expected[1], expected[2]);
    reference::geglu(gate, up, expected[3]);
    reference::geglu_backward(dy, gate, up, expected[4], expected[5]);
    const auto results = under_all_schedules([&] {
      const Operand d = bench().put(dy, offset), y = bench().put(Tensor(dtype(), shape), offset);
      std::vector<Tensor> found;
      for (const bool gelu : {false, true}) {
        const Operand g = bench().put(gate, offset), u = bench().put(up, offset);
        if (gelu) {
          ops().geglu(g, u, y, stream());
          ops().geglu_backward(d, g, u, g, u, stream());
        } else {
          ops().swiglu(g, u, y, stream());
          ops().swiglu_backward(d, g, u, g, u, stream());
        }
        found.insert(found.end(), {bench().get(y), bench().get(g), bench().get(u)});
      }
      return found;
    });
    for (std::size_t i = 0; i < expected.size(); ++i) expect_equal(results[i], expected[i]);
  });
}

TEST_P(PointwiseOps, AddIsTheSumAlsoInPlace) {
  everywhere([&](const Shape& shape, std::size_t offset) {
    Random random(3);
    const Tensor a = wide(random, dtype(), shape), b = random.tensor(dtype(), shape);
    Tensor expected(dtype(), shape);
    reference::add(a, b, expected);
    const auto results = under_all_schedules([&] {
      const Operand y = bench().put(a, offset), z = bench().put(b, offset), other = bench().put(b, offset);
      const Operand original = bench().put(a, offset);
      ops().add(y, other, y, stream());
      ops().add(original, z, z, stream());
      return std::vector<Tensor>{bench().get(y), bench().get(z)};
    });
    expect_equal(results[0], expected);
    expect_equal(results[1], expected);
  });
}

TEST_P(PointwiseOps, AScaledSumIsRoundedOnceAlsoInPlace) {
  everywhere([&](const Shape& shape, std::size_t offset) {
    Random random(4);
    const Tensor x = wide(random, dtype(), shape), residual = random.tensor(dtype(), shape);
    Tensor sum(dtype(), shape), scaled(dtype(), shape);
    reference::add_scaled(x, 0.22F, residual, sum);
    reference::add_scaled(x, 0.22F, {}, scaled);
    const auto results = under_all_schedules([&] {
      const Operand y = bench().put(x, offset), z = bench().put(residual, offset), alone = bench().put(x, offset);
      const Operand original = bench().put(x, offset), before = bench().put(residual, offset);
      ops().add_scaled(y, 0.22F, before, y, stream());
      ops().add_scaled(original, 0.22F, z, z, stream());
      ops().add_scaled(alone, 0.22F, {}, alone, stream());
      return std::vector<Tensor>{bench().get(y), bench().get(z), bench().get(alone)};
    });
    expect_equal(results[0], sum);
    expect_equal(results[1], sum);
    expect_equal(results[2], scaled);
  });
}

TEST_P(PointwiseOps, RopeIsTheReferenceAndTheInverseUndoesIt) {
  for (const auto& [dim, rotated] : {std::pair{2, 2}, {6, 6}, {16, 16}, {64, 64}, {6, 4}, {24, 16}, {12, 8}}) {
    for (const std::size_t offset : offsets(dtype())) {
      const Shape shape{3, 37, 3, dim};
      Random random(11);
      Tensor table(DType::f32, {37, rotated / 2, 2});
      for (std::int64_t i = 0; i < table.count(); i += 2) {
        const float angle = random.normal(3.0F);
        table.set(i, std::cos(angle));
        table.set(i + 1, std::sin(angle));
      }
      const Tensor x = random.tensor(dtype(), shape);
      for (const bool inverse : {false, true}) {
        Tensor expected = x;
        reference::rope(expected, table, inverse);
        const auto results = under_all_schedules([&] {
          const Operand y = bench().put(x, offset), angles = bench().put(table, offset / 4 * 4);
          ops().rope(y, angles, {}, inverse, stream());
          const Tensor turned = bench().get(y);
          ops().rope(y, angles, {}, !inverse, stream());
          return std::vector<Tensor>{turned, bench().get(y)};
        });
        EXPECT_WITHIN(results[0], expected, dtype(), false);
        EXPECT_WITHIN(results[1], x, dtype(), true);
      }
    }
  }
}

TEST_P(PointwiseOps, EmbeddingAndItsGradientAreTheReferenceToTheBit) {
  const std::int64_t vocabulary = 101, sequence = 37, tokens = 9 * sequence;  // more rows than a block has threads
  for (const std::int64_t channels : {1, 24, 52, 130}) {
    for (const bool with_positions : {false, true}) {
      SCOPED_TRACE(channels);
      Random random(4);
      const Tensor ids = random.tokens({tokens}, 11), table = random.tensor(DType::bf16, {vocabulary, channels});
      const Tensor places = random.tensor(DType::bf16, {64, channels}),
                   dout = random.tensor(dtype(), {tokens, channels});
      const Tensor dtable_before = random.tensor(DType::f32, {vocabulary, channels});
      const Tensor dplaces_before = random.tensor(DType::f32, {64, channels});
      Tensor out_expected(dtype(), {tokens, channels}), dt_expected = dtable_before, dp_expected = dplaces_before;
      reference::embedding(ids, table, with_positions ? places.view() : TensorView{}, sequence, out_expected);
      reference::embedding_backward(dout, ids, sequence, dt_expected,
                                    with_positions ? dp_expected.view() : TensorView{});
      const auto results = under_all_schedules([&] {
        const Operand i = bench().put(ids), t = bench().put(table), p = bench().put(places), d = bench().put(dout);
        const Operand out = bench().put(Tensor(dtype(), {tokens, channels})), dt = bench().put(dtable_before);
        const Operand dp = bench().put(dplaces_before);
        ops().embedding(i, t, with_positions ? p.view() : TensorView{}, sequence, out, stream());
        ops().embedding_backward(d, i, sequence, dt, with_positions ? dp.view() : TensorView{}, {}, stream());
        return std::vector<Tensor>{bench().get(out), bench().get(dt), bench().get(dp)};
      });
      EXPECT_SAME_BITS(results[0], out_expected);
      EXPECT_SAME_BITS(results[1], dt_expected);
      EXPECT_SAME_BITS(results[2], dp_expected);
    }
  }
}

TEST_P(PointwiseOps, PositionsOfPackedRecordsAreTheReferences) {
  const PackedRecords records = two_packed_rows();
  for (const std::int64_t channels : {1, 24, 130}) {
    Random random(14);
    const Tensor ids = random.tokens({400}, 11), table = random.tensor(DType::bf16, {11, channels});
    const Tensor places = random.tensor(DType::bf16, {200, channels}), dout = random.tensor(dtype(), {400, channels});
    const Tensor angles = random.tensor(DType::f32, {200, 8, 2}), x = random.tensor(dtype(), {2, 200, 3, 16});
    Tensor out_expected(dtype(), {400, channels}), dplaces_expected = random.tensor(DType::f32, {200, channels});
    const Tensor dplaces_before = dplaces_expected;
    Tensor turned_expected = x;
    const TokenRows rows(200, records.view());
    reference::embedding(ids, table, places, rows, out_expected);
    reference::embedding_backward(dout, ids, rows, {}, dplaces_expected);
    reference::rope(turned_expected, angles, true, records.view());
    const auto results = under_all_schedules([&] {
      const Operand first = bench().put(records.first), end = bench().put(records.end);
      const TokenRows there(200, {first.as<std::int32_t>(), end.as<std::int32_t>()});
      const Operand i = bench().put(ids), t = bench().put(table), p = bench().put(places), d = bench().put(dout);
      const Operand out = bench().put(Tensor(dtype(), {400, channels})), dp = bench().put(dplaces_before);
      const Operand y = bench().put(x), a = bench().put(angles);
      ops().embedding(i, t, p, there, out, stream());
      ops().embedding_backward(d, i, there, {}, dp, {}, stream());
      ops().rope(y, a, there.records, true, stream());
      return std::vector<Tensor>{bench().get(out), bench().get(dp), bench().get(y)};
    });
    EXPECT_SAME_BITS(results[0], out_expected);
    EXPECT_SAME_BITS(results[1], dplaces_expected);
    EXPECT_WITHIN(results[2], turned_expected, dtype(), false);
  }
}

// More channels than a block's threads hold, rows that are not aligned, tokens that come once, often and never.
TEST_P(PointwiseOps, TheEmbeddingsGradientInBf16IsTheSumRoundedOnce) {
  const std::int64_t vocabulary = 71, sequence = 37, tokens = 9 * sequence;
  for (const std::int64_t channels : {1, 24, 130, 2311}) {
    SCOPED_TRACE(channels);
    Random random(4);
    const Tensor ids = with_strangers(random.tokens({tokens}, 50), vocabulary);
    const Tensor dout = random.tensor(dtype(), {tokens, channels}), zeros(DType::f32, {vocabulary, channels});
    const Tensor anything = random.tensor(DType::bf16, {vocabulary, channels});
    const auto results = under_all_schedules([&] {
      const Operand i = bench().put(ids), d = bench().put(dout), dt = bench().put(anything), sums = bench().put(zeros);
      ops().embedding_backward(d, i, sequence, dt, {}, {}, stream());
      ops().embedding_backward(d, i, sequence, sums, {}, {}, stream());
      return std::vector<Tensor>{bench().get(dt), bench().get(sums)};
    });
    EXPECT_SAME_BITS(results[0], rounded(results[1]));
  }
}

// Gradient of a table that the head has written: rows of tokens before they were rounded, plus the embedding's.
TEST_P(PointwiseOps, TheEmbeddingsGradientGoesOnFromRowsOfTokens) {
  const std::int64_t vocabulary = 71, sequence = 37, tokens = 9 * sequence;
  for (const std::int64_t channels : {1, 24, 130, 2311}) {
    SCOPED_TRACE(channels);
    Random random(4);
    const Tensor ids = with_strangers(random.tokens({tokens}, 50), vocabulary);
    const Tensor dout = random.tensor(dtype(), {tokens, channels});
    const Tensor begun = random.tensor(DType::f32, {vocabulary, channels});
    const Tensor head = rounded(begun);
    Tensor rows(DType::f32, {tokens, channels});
    std::vector<bool> seen(static_cast<std::size_t>(vocabulary));
    for (std::int64_t i = 0; i < tokens; ++i) {  // rows of a token's later places, or of no token, are not read
      const std::int32_t token = ids.view().as<std::int32_t>()[i];
      const bool first = token >= 0 && token < vocabulary && !seen[static_cast<std::size_t>(token)];
      for (std::int64_t c = 0; c < channels; ++c) {
        rows.set(i * channels + c, first ? static_cast<float>(begun.get(token * channels + c)) : NAN);
      }
      if (first) seen[static_cast<std::size_t>(token)] = true;
    }
    const auto results = under_all_schedules([&] {
      const Operand i = bench().put(ids), d = bench().put(dout), dt = bench().put(head), sums = bench().put(begun);
      const Operand r = bench().put(rows);
      ops().embedding_backward(d, i, sequence, dt, {}, r, stream());
      ops().embedding_backward(d, i, sequence, sums, {}, {}, stream());
      return std::vector<Tensor>{bench().get(dt), bench().get(sums)};
    });
    EXPECT_SAME_BITS(results[0], rounded(results[1]));
  }
}

TEST_P(PointwiseOps, ATokenOutsideTheVocabularyShowsAsNaNAndTouchesNothingElse) {
  Random random(5);
  const Tensor table = random.tensor(DType::bf16, {11, 8}), before = random.tensor(DType::f32, {11, 8});
  for (const std::int32_t wrong : {11, -1}) {
    Tensor ids(DType::i32, {3});
    ids.view().as<std::int32_t>()[1] = wrong;
    const Operand i = bench().put(ids), t = bench().put(table), out = bench().put(Tensor(dtype(), {3, 8}));
    const Operand dt = bench().put(before);
    ops().embedding(i, t, {}, 3, out, stream());
    const Tensor rows = bench().get(out);
    for (std::int64_t e = 0; e < 24; ++e) EXPECT_EQ(std::isnan(rows.get(e)), e / 8 == 1) << e;
    ops().embedding_backward(out, i, 3, dt, {}, {}, stream());
    const Tensor after = bench().get(dt);
    EXPECT_TRUE(after.intact());
    for (std::int64_t e = 8; e < 88; ++e) EXPECT_EQ(after.get(e), before.get(e)) << e;
  }
}

INSTANTIATE_TEST_SUITE_P(Activations, PointwiseOps, ::testing::Values(DType::f32, DType::bf16), dtype_name);

}  // namespace
}  // namespace tandem::testing
