// Activations, sums and embeddings on the CPU are their formulas, also in place.
#include "cpu_ops/kernels/kernels.hpp"
#include "cpu_ops/reference/reference.hpp"
#include "tests/cpu_ops/op_testing.hpp"
#include "tests/cpu_ops/packed_records.hpp"

namespace tandem::testing {
namespace {

const Shape pointwise_shapes[] = {{1, 1}, {1, 22}, {3, 37}, {55, 1001}};

class Pointwise : public ::testing::TestWithParam<DType> {
 protected:
  /// Wide values, with zeros, infinities, denormals and a NaN among them.
  static Tensor wide(Random& random, DType dtype, const Shape& shape) {
    Tensor t = random.tensor(dtype, shape, 4.0F);
    const float special[] = {0.0F, -0.0F, INFINITY, -INFINITY, 1e-41F, -1e-41F, 1e30F, -1e30F, NAN, 0.3F, 100.0F};
    for (std::int64_t i = 0; i < std::min<std::int64_t>(11, t.count() - 1); ++i) t.set(i + 1, special[i]);
    return t;
  }
};

/// The formulas are the same sequence of roundings everywhere: equal, not close (any NaN equals any NaN).
void expect_equal(const Tensor& actual, const Tensor& expected) {
  for (std::int64_t i = 0; i < expected.count(); ++i) {
    const double a = actual.get(i), e = expected.get(i);
    ASSERT_TRUE((std::isnan(a) && std::isnan(e)) || (a == e && std::signbit(a) == std::signbit(e)))
        << i << ": " << a << " for " << e;
  }
  EXPECT_TRUE(actual.intact());
}

TEST_P(Pointwise, GeluIsTheFormulaAlsoInPlace) {
  for (const Shape& shape : pointwise_shapes) {
    Random random(1);
    const Tensor x = wide(random, GetParam(), shape), dy = random.tensor(GetParam(), shape);
    Tensor y_expected(GetParam(), shape), dx_expected(GetParam(), shape);
    reference::gelu(x, y_expected);
    reference::gelu_backward(dy, x, dx_expected);
    for (const auto& arena : arenas()) {
      Tensor y(GetParam(), shape), dx = dy;
      fast::gelu(*arena, x, y);
      expect_equal(y, y_expected);
      fast::gelu_backward(*arena, dx, x, dx);
      expect_equal(dx, dx_expected);
    }
  }
}

TEST_P(Pointwise, ActivationsWithAGateAreTheFormulaAlsoInPlace) {
  struct Gated {
    decltype(&fast::swiglu) forward;
    decltype(&fast::swiglu_backward) backward;
    decltype(&reference::swiglu) forward_reference;
    decltype(&reference::swiglu_backward) backward_reference;
  };
  const Gated both[] = {
      {fast::swiglu, fast::swiglu_backward, reference::swiglu, reference::swiglu_backward},
      {fast::geglu, fast::geglu_backward, reference::geglu, reference::geglu_backward},
  };
  for (const Shape& shape : pointwise_shapes) {
    for (const Gated& op : both) {
      Random random(2);
      const Tensor gate = wide(random, GetParam(), shape), up = random.tensor(GetParam(), shape);
      const Tensor dy = random.tensor(GetParam(), shape);
      Tensor y_expected(GetParam(), shape), dgate_expected(GetParam(), shape), dup_expected(GetParam(), shape);
      op.forward_reference(gate, up, y_expected);
      op.backward_reference(dy, gate, up, dgate_expected, dup_expected);
      for (const auto& arena : arenas()) {
        Tensor y(GetParam(), shape), dgate = gate, dup = up;
        op.forward(*arena, gate, up, y);
        expect_equal(y, y_expected);
        op.backward(*arena, dy, dgate, dup, dgate, dup);
        expect_equal(dgate, dgate_expected);
        expect_equal(dup, dup_expected);
      }
    }
  }
}

/// Values of both gated activations beside their formulas in double.
TEST(GatedReference, AreTheFormulasOfTheirNames) {
  Tensor gate(DType::f32, {3}), up(DType::f32, {3}), y(DType::f32, {3});
  for (const float g : {-1.5F, 0.25F, 2.0F}) {
    gate.set(0, g);
    up.set(0, 3.0F);
    const auto x = static_cast<double>(g);
    reference::swiglu(gate, up, y);
    EXPECT_NEAR(y.get(0), 3.0 * x / (1.0 + std::exp(-x)), 1e-6);
    reference::geglu(gate, up, y);
    EXPECT_NEAR(y.get(0), 1.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x))), 1e-6);
  }
}

TEST_P(Pointwise, AddIsTheSumAlsoInPlace) {
  for (const Shape& shape : pointwise_shapes) {
    Random random(3);
    const Tensor a = wide(random, GetParam(), shape), b = random.tensor(GetParam(), shape);
    Tensor expected(GetParam(), shape);
    reference::add(a, b, expected);
    for (const auto& arena : arenas()) {
      Tensor y = a, z = b;
      fast::add(*arena, y, b, y);
      fast::add(*arena, a, z, z);
      expect_equal(y, expected);
      expect_equal(z, expected);
    }
  }
}

TEST_P(Pointwise, AScaledSumIsRoundedOnceAlsoInPlace) {
  for (const Shape& shape : pointwise_shapes) {
    Random random(4);
    const Tensor x = wide(random, GetParam(), shape), residual = random.tensor(GetParam(), shape);
    Tensor sum(GetParam(), shape), scaled(GetParam(), shape);
    reference::add_scaled(x, 0.22F, residual, sum);
    reference::add_scaled(x, 0.22F, {}, scaled);
    for (const auto& arena : arenas()) {
      Tensor y = x, z = residual, alone = x;
      fast::add_scaled(*arena, y, 0.22F, residual, y);
      fast::add_scaled(*arena, x, 0.22F, z, z);
      fast::add_scaled(*arena, alone, 0.22F, {}, alone);
      expect_equal(y, sum);
      expect_equal(z, sum);
      expect_equal(alone, scaled);
    }
  }
}

class Embedding : public ::testing::TestWithParam<DType> {};

TEST_P(Embedding, ForwardAndBackwardAreTheReference) {
  const std::int64_t vocabulary = 101, sequence = 37, tokens = 3 * sequence;
  for (const std::int64_t channels : {1, 24, 52, 130}) {
    for (const bool with_positions : {false, true}) {
      Random random(4);
      const Tensor ids = random.tokens({tokens}, 11), table = random.tensor(DType::bf16, {vocabulary, channels});
      const Tensor places = random.tensor(DType::bf16, {64, channels});
      const Tensor dout = random.tensor(GetParam(), {tokens, channels});
      const Tensor dtable_before = random.tensor(DType::f32, {vocabulary, channels});
      const Tensor dplaces_before = random.tensor(DType::f32, {64, channels});
      Tensor out_expected(GetParam(), {tokens, channels}), dt_expected = dtable_before, dp_expected = dplaces_before;
      const TensorView positions = with_positions ? places.view() : TensorView{};
      reference::embedding(ids, table, positions, sequence, out_expected);
      reference::embedding_backward(dout, ids, sequence, dt_expected,
                                    with_positions ? dp_expected.view() : TensorView{});
      for (const auto& arena : arenas()) {
        Tensor out(GetParam(), {tokens, channels}), dt = dtable_before, dp = dplaces_before;
        fast::embedding(*arena, ids, table, positions, sequence, out);
        fast::embedding_backward(*arena, dout, ids, sequence, dt, with_positions ? dp.view() : TensorView{});
        // One fp32 addition after the other in the order of rows, in both: the same bits.
        EXPECT_SAME_BITS(out, out_expected);
        EXPECT_SAME_BITS(dt, dt_expected);
        EXPECT_SAME_BITS(dp, dp_expected);
      }
    }
  }
}

TEST_P(Embedding, PackedRecordsBeginAtPositionZeroAgain) {
  const std::int64_t vocabulary = 11, channels = 52;
  const PackedRecords records = two_packed_rows();
  const TokenRows rows(200, records.view());
  Random random(6);
  const Tensor ids = random.tokens({400}, 11), table = random.tensor(DType::bf16, {vocabulary, channels});
  const Tensor places = random.tensor(DType::bf16, {200, channels}), dout = random.tensor(GetParam(), {400, channels});
  Tensor out(GetParam(), {400, channels}), dplaces(DType::f32, {200, channels});
  Tensor out_expected = out, dplaces_expected = dplaces;
  reference::embedding(ids, table, places, rows, out_expected);
  reference::embedding_backward(dout, ids, rows, {}, dplaces_expected);
  for (const PackedRecord& record : records.all) {
    const std::int64_t first = record.row * 200 + record.first;
    const float place = static_cast<float>(places.get(0)),
                row = static_cast<float>(table.get(ids.view().as<std::int32_t>()[first] * channels));
    Tensor sum(GetParam(), {1});
    sum.set(0, place + row);
    EXPECT_EQ(out_expected.get(first * channels), sum.get(0));
  }
  for (const auto& arena : arenas()) {
    fast::embedding(*arena, ids, table, places, rows, out);
    EXPECT_SAME_BITS(out, out_expected);
    std::fill_n(dplaces.view().as<float>(), dplaces.count(), 0.0F);
    fast::embedding_backward(*arena, dout, ids, rows, {}, dplaces);
    EXPECT_SAME_BITS(dplaces, dplaces_expected);
  }
}

// More columns than a thread sums at once; tokens that come once, often and never.
TEST_P(Embedding, ItsGradientInBf16IsTheSumRoundedOnce) {
  const std::int64_t vocabulary = 101, sequence = 37, tokens = 3 * sequence;
  for (const std::int64_t channels : {1, 52, 256, 301}) {
    Random random(4);
    const Tensor ids = random.tokens({tokens}, 60), dout = random.tensor(GetParam(), {tokens, channels});
    Tensor sums(DType::f32, {vocabulary, channels});
    fast::embedding_backward(*arenas()[0], dout, ids, sequence, sums, {});
    const Tensor expected = rounded(sums);
    Tensor by_reference = random.tensor(DType::bf16, {vocabulary, channels});
    reference::embedding_backward(dout, ids, sequence, by_reference, {});
    for (const auto& arena : arenas()) {
      Tensor dt = random.tensor(DType::bf16, {vocabulary, channels});
      fast::embedding_backward(*arena, dout, ids, sequence, dt, {});
      EXPECT_SAME_BITS(dt, expected);
      EXPECT_CLOSE(dt, by_reference);
    }
  }
}

// Gradient of a table that the head has written: rows of tokens before they were rounded, plus the embedding's.
TEST_P(Embedding, ItsGradientGoesOnFromRowsOfTokens) {
  const std::int64_t vocabulary = 101, sequence = 37, tokens = 3 * sequence;
  for (const std::int64_t channels : {1, 52, 256, 301}) {
    Random random(4);
    const Tensor ids = random.tokens({tokens}, 60), dout = random.tensor(GetParam(), {tokens, channels});
    Tensor sums = random.tensor(DType::f32, {vocabulary, channels}), rows(DType::f32, {tokens, channels});
    const Tensor head = rounded(sums);
    std::vector<bool> seen(vocabulary);
    for (std::int64_t i = 0; i < tokens; ++i) {  // rows of a token's later places are not read
      const auto token = static_cast<std::size_t>(ids.view().as<std::int32_t>()[i]);
      for (std::int64_t c = 0; c < channels; ++c) {
        const double first = sums.get(static_cast<std::int64_t>(token) * channels + c);
        rows.set(i * channels + c, seen[token] ? NAN : static_cast<float>(first));
      }
      seen[token] = true;
    }
    fast::embedding_backward(*arenas()[0], dout, ids, sequence, sums, {});
    const Tensor expected = rounded(sums);
    Tensor by_reference = head;
    reference::embedding_backward(dout, ids, sequence, by_reference, {}, rows);
    for (const auto& arena : arenas()) {
      Tensor dt = head;
      fast::embedding_backward(*arena, dout, ids, sequence, dt, {}, rows);
      EXPECT_SAME_BITS(dt, expected);
      EXPECT_CLOSE(dt, by_reference);
    }
  }
}

TEST(EmbeddingChecks, ATokenOutsideTheVocabularyThrowsAndWritesNothing) {
  Random random(5);
  const Tensor table = random.tensor(DType::bf16, {11, 8});
  for (const std::int32_t wrong : {11, -1}) {
    Tensor ids(DType::i32, {3}), out = random.tensor(DType::f32, {3, 8});
    const Tensor before = out;
    ids.view().as<std::int32_t>()[2] = wrong;
    EXPECT_THROW(fast::embedding(*arenas()[0], ids, table, {}, 3, out), MisuseError);
    EXPECT_SAME_BITS(out, before);
  }
}

INSTANTIATE_TEST_SUITE_P(Activations, Pointwise, ::testing::Values(DType::f32, DType::bf16), dtype_name);
INSTANTIATE_TEST_SUITE_P(Activations, Embedding, ::testing::Values(DType::f32, DType::bf16), dtype_name);

}  // namespace
}  // namespace tandem::testing
