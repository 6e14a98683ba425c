// Attention on the CPU against its reference, its windows and its derivative.
#include "cpu_ops/kernels/kernels.hpp"
#include "cpu_ops/reference/reference.hpp"
#include "tests/cpu_ops/op_testing.hpp"
#include "tests/cpu_ops/packed_records.hpp"

namespace tandem::testing {
namespace {

class Attention : public ::testing::TestWithParam<DType> {};

// (B, T, heads, kv heads, head dim), scale and window: odd, grouped, several blocks with a short last one, a single
// token; windows of one token and two, shorter and longer than a block and as long, of all tokens but one and of more.
const AttentionShape all_shapes[] = {
    {3, 37, 3, 1, 5, 0.4F},        {1, 1, 1, 1, 16, 0.25F},       {2, 64, 4, 2, 16, 0.25F},
    {1, 131, 6, 3, 64, 0.125F},    {2, 200, 2, 2, 5, 0.5F},       {3, 37, 3, 1, 5, 0.4F, 1},
    {2, 131, 4, 2, 16, 0.25F, 2},  {2, 200, 2, 2, 5, 0.5F, 37},   {1, 131, 2, 1, 64, 0.125F, 63},
    {2, 131, 2, 1, 16, 0.25F, 64}, {1, 200, 4, 2, 16, 0.25F, 65}, {1, 259, 2, 1, 16, 0.25F, 150},
    {3, 37, 3, 1, 5, 0.4F, 36},    {1, 131, 2, 1, 16, 0.25F, 136}};

AttentionShape with_window(AttentionShape s, std::int64_t window) {
  s.window = window;
  return s;
}

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
    SCOPED_TRACE(std::to_string(s.sequence) + " tokens, window " + std::to_string(s.window));
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

/// One head's scores as a whole (T, T) matrix, of which a query is left the keys that are less than a window before it.
TEST(AttentionReference, AWindowHidesWhatIsThatFarBeforeAToken) {
  const std::int64_t tokens = 23, dim = 5;
  Random random(12);
  for (const std::int64_t window : {1, 2, 7, 22, 23, 28}) {
    const AttentionShape s{1, tokens, 1, 1, dim, 0.4F, window};
    const Packed in(random, DType::f32, s);
    Tensor out(DType::f32, out_shape(s)), lse(DType::f32, lse_shape(s));
    reference::attention(in.q(), in.k(), in.v(), out, lse, s);
    const auto element = [&](std::int64_t part, std::int64_t t, std::int64_t d) {
      return in.buffer.get((t * 3 + part) * dim + d);
    };
    for (std::int64_t t = 0; t < tokens; ++t) {
      double sum = 0.0;
      std::vector<double> expected(static_cast<std::size_t>(dim));
      for (std::int64_t j = 0; j < tokens; ++j) {
        const bool hidden = j > t || t - j >= window;
        double score = 0.0;
        for (std::int64_t d = 0; d < dim; ++d) score += element(0, t, d) * element(1, j, d);
        const double weight = hidden ? 0.0 : std::exp(static_cast<double>(s.scale) * score);
        sum += weight;
        for (std::int64_t d = 0; d < dim; ++d) expected[static_cast<std::size_t>(d)] += weight * element(2, j, d);
      }
      EXPECT_NEAR(lse.get(t), std::log(sum), 1e-5) << t;
      for (std::int64_t d = 0; d < dim; ++d) {
        EXPECT_NEAR(out.get(t * dim + d), expected[static_cast<std::size_t>(d)] / sum, 1e-5) << t;
      }
    }
  }
}

class AttentionDerivative : public ::testing::TestWithParam<std::int64_t> {};

/// The loss sum(dout * out) in double by central differences.
TEST_P(AttentionDerivative, IsTheReferencesBackward) {
  const AttentionShape s{1, 7, 2, 1, 3, 0.6F, GetParam()};
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

/// Forward and backward by the fast kernels.
struct Results {
  Results(const Packed& in, const Tensor& dout, const AttentionShape& s, Parallel& threads = *arenas()[1])
      : out(dout.dtype(), out_shape(s)), lse(DType::f32, lse_shape(s)), d(dout.dtype(), s) {
    LentWorkspace lent(std::max(fast::attention_scratch(s.sequence, s.head_dim, threads.threads()),
                                fast::attention_backward_scratch(s.sequence, s.head_dim, threads.threads())));
    fast::attention(threads, lent.get(), in.q(), in.k(), in.v(), out, lse, s);
    fast::attention_backward(threads, lent.get(), dout, in.q(), in.k(), in.v(), out, lse, d.q(), d.k(), d.v(), s);
  }
  Tensor out, lse;
  Packed d;
};

/// Heads and windows that records are packed under: the window shorter and longer than most, of one token, and none.
std::vector<AttentionShape> packed_shapes(const PackedRecords& records) {
  std::vector<AttentionShape> all;
  for (const std::int64_t window : {0, 1, 37, 64, 100}) {
    all.push_back({2, 200, 4, 2, 16, 0.25F, window, records.view()});
    all.push_back({2, 200, 1, 1, 5, 0.4F, window, records.view()});
  }
  return all;
}

TEST_P(Attention, PackedRecordsAreTheReference) {
  const PackedRecords records = two_packed_rows();
  for (const AttentionShape& s : packed_shapes(records)) {
    SCOPED_TRACE("window " + std::to_string(s.window));
    Random random(13);
    const Packed in(random, GetParam(), s);
    const Tensor dout = random.tensor(GetParam(), out_shape(s));
    Tensor out(GetParam(), out_shape(s)), lse(DType::f32, lse_shape(s));
    Packed d(GetParam(), s);
    reference::attention(in.q(), in.k(), in.v(), out, lse, s);
    reference::attention_backward(dout, in.q(), in.k(), in.v(), out, lse, d.q(), d.k(), d.v(), s);
    const Results one(in, dout, s, *arenas()[0]), five(in, dout, s, *arenas()[2]);
    EXPECT_CLOSE(one.out, out);
    EXPECT_CLOSE(one.lse, lse);
    EXPECT_CLOSE(one.d.buffer, d.buffer);
    EXPECT_SAME_BITS(five.out, one.out);
    EXPECT_SAME_BITS(five.lse, one.lse);
    EXPECT_SAME_BITS(five.d.buffer, one.d.buffer);
  }
}

/// Rows of a record, `width` elements each, out of a packed tensor.
Tensor rows_of(const Tensor& packed, const PackedRecord& record, std::int64_t sequence, std::int64_t width) {
  Tensor rows(packed.dtype(), {1, record.length, width});
  const std::int64_t from = (record.row * sequence + record.first) * width;
  for (std::int64_t i = 0; i < rows.count(); ++i) rows.set(i, static_cast<float>(packed.get(from + i)));
  return rows;
}

TEST(AttentionScores, BlocksThatNoQuerySeesAreNotMade) {
  const PackedRecords records = two_packed_rows();
  AttentionShape s{2, 200, 1, 1, 16, 0.25F};
  const auto of_record = [](std::int64_t length) {  // blocks of 64 queries, each with the keys up to its last
    std::int64_t scores = 0;
    for (std::int64_t begin = 0; begin < length; begin += 64) {
      const std::int64_t end = std::min(begin + 64, length);
      scores += (end - begin) * end;
    }
    return scores;
  };
  EXPECT_EQ(fast::attention_scores(s), 2 * of_record(200));
  s.records = records.view();
  std::int64_t expected = 0;
  for (const PackedRecord& record : records.all) expected += of_record(record.length);
  EXPECT_EQ(fast::attention_scores(s), expected);
  s.window = 1;  // the diagonal's blocks, and for a token that begins one none before it
  EXPECT_LT(fast::attention_scores(s), expected);
}

TEST_P(Attention, APackedRecordHasTheBitsOfOneAlone) {
  const PackedRecords records = two_packed_rows();
  for (const AttentionShape& s : packed_shapes(records)) {
    Random random(14);
    const Packed in(random, GetParam(), s);
    const Tensor dout = random.tensor(GetParam(), out_shape(s));
    const Results packed(in, dout, s);
    for (const PackedRecord& record : records.all) {
      SCOPED_TRACE(std::to_string(record.length) + " tokens from " + std::to_string(record.first) + ", window " +
                   std::to_string(s.window));
      AttentionShape own = s;
      own.batch = 1, own.sequence = record.length, own.records = {};
      const std::int64_t width = in.buffer.view().shape[2], dense = s.heads * s.head_dim;
      Packed alone(GetParam(), own);
      alone.buffer = rows_of(in.buffer, record, s.sequence, width);
      const Results results(alone, rows_of(dout, record, s.sequence, dense), own);
      EXPECT_SAME_BITS(results.out, rows_of(packed.out, record, s.sequence, dense));
      EXPECT_SAME_BITS(results.d.buffer, rows_of(packed.d.buffer, record, s.sequence, width));
    }
  }
}

class AttentionWindow : public ::testing::TestWithParam<DType> {
 protected:
  // Two query heads over one, 131 tokens of which each sees 37: rows are q, q, k and v, 16 elements each.
  static constexpr std::int64_t tokens = 131, window = 37, dim = 16, width = 4 * dim;
  const AttentionShape shape_{1, tokens, 2, 1, dim, 0.25F, window};
  Random random_{13};
  Packed in_{random_, GetParam(), shape_};
  Tensor dout_ = random_.tensor(GetParam(), out_shape(shape_));

  /// Whether elements [begin, end) of each row of tokens [first, last) are the same in both.
  static bool same(const Tensor& a, const Tensor& b, std::int64_t row, std::int64_t first, std::int64_t last,
                   std::int64_t begin, std::int64_t end) {
    const std::size_t size = size_of(a.dtype());
    for (std::int64_t t = first; t < last; ++t) {
      const std::size_t at = static_cast<std::size_t>(t * row + begin) * size;
      if (std::memcmp(a.bytes().data() + at, b.bytes().data() + at, static_cast<std::size_t>(end - begin) * size) != 0)
        return false;
    }
    return true;
  }
};

TEST_P(AttentionWindow, OfAllTokensOrMoreChangesNoBit) {
  const Results none(in_, dout_, with_window(shape_, 0));
  for (const std::int64_t longer : {tokens, tokens + 5, tokens << 40}) {
    const Results of(in_, dout_, with_window(shape_, longer));
    EXPECT_SAME_BITS(of.out, none.out);
    EXPECT_SAME_BITS(of.lse, none.lse);
    EXPECT_SAME_BITS(of.d.buffer, none.d.buffer);
  }
  EXPECT_NE(Results(in_, dout_, with_window(shape_, tokens - 1)).out.bytes(), none.out.bytes());
}

TEST_P(AttentionWindow, TokensThatAreSeenByNobodyChangeNothing) {
  const Results before(in_, dout_, shape_);
  const std::int64_t changed = 50, unaware = changed + window - 1;
  for (std::int64_t t = 0; t < changed; ++t) {  // their keys and values
    for (std::int64_t i = 2 * dim; i < width; ++i) in_.buffer.set(t * width + i, random_.normal(3.0F));
  }
  const Results after(in_, dout_, shape_);
  EXPECT_TRUE(same(after.out, before.out, 2 * dim, unaware, tokens, 0, 2 * dim));
  EXPECT_TRUE(same(after.d.buffer, before.d.buffer, width, unaware, tokens, 0, width));
  EXPECT_FALSE(same(after.out, before.out, 2 * dim, unaware - 1, unaware, 0, dim));
  EXPECT_FALSE(same(after.d.buffer, before.d.buffer, width, unaware - 1, unaware, 0, dim));
}

TEST_P(AttentionWindow, GradientsReachNoFurther) {
  const std::int64_t first = 100, reached = first - window + 1;
  for (std::int64_t i = 0; i < first * 2 * dim; ++i) dout_.set(i, 0.0F);
  const Results results(in_, dout_, shape_);
  for (std::int64_t i = 0; i < reached * width; ++i) ASSERT_EQ(results.d.buffer.get(i), 0.0) << i;
  for (std::int64_t i = 2 * dim; i < width; ++i) EXPECT_NE(results.d.buffer.get(reached * width + i), 0.0) << i;
}

/// Blocks outside of the window hold NaNs, which would show in every sum that they were part of, with whatever weight.
TEST_P(AttentionWindow, BlocksOutsideOfItAreLeftOut) {
  const std::int64_t block = 64, last = 2 * block;
  const Results clean(in_, dout_, shape_);
  Packed no_keys = in_, no_queries = in_;
  Tensor no_gradient = dout_;
  for (std::int64_t t = 0; t < block; ++t) {
    for (std::int64_t i = 2 * dim; i < width; ++i) no_keys.buffer.set(t * width + i, NAN);
  }
  for (std::int64_t t = last; t < tokens; ++t) {
    for (std::int64_t i = 0; i < 2 * dim; ++i) {
      no_queries.buffer.set(t * width + i, NAN);
      no_gradient.set(t * 2 * dim + i, NAN);
    }
  }
  // The last block of queries sees none of the first of keys, nor is this seen by it.
  const Results of_queries(no_keys, dout_, shape_), of_keys(no_queries, no_gradient, shape_);
  EXPECT_TRUE(same(of_queries.out, clean.out, 2 * dim, last, tokens, 0, 2 * dim));
  EXPECT_TRUE(same(of_queries.d.buffer, clean.d.buffer, width, last, tokens, 0, 2 * dim));
  EXPECT_TRUE(same(of_keys.d.buffer, clean.d.buffer, width, 0, block, 0, width));
  EXPECT_TRUE(std::isnan(of_keys.d.buffer.get(block * width + 2 * dim)));
}

class Rope : public ::testing::TestWithParam<DType> {};

TEST_P(Rope, IsTheReferenceAndTheInverseUndoesIt) {
  for (const auto& [dim, turned] : {std::pair{2, 2}, {6, 6}, {16, 16}, {64, 64}, {6, 4}, {16, 12}, {96, 72}, {7, 6}}) {
    const Shape shape{3, 37, 3, dim};
    Random random(11);
    Tensor table(DType::f32, {37, turned / 2, 2});
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
        for (std::int64_t i = 0; i < y.count(); ++i) {
          if (i % dim >= turned) {
            EXPECT_EQ(y.get(i), x.get(i)) << "not turned";
          }
        }
        fast::rope(*arena, y, table, !inverse);
        EXPECT_LE(relative_error(y, x), 2 * tolerance(GetParam()));
      }
    }
  }
}

TEST_P(Rope, PackedRecordsBeginAtPositionZeroAgain) {
  const PackedRecords records = two_packed_rows();
  Random random(12);
  const Tensor table = random.tensor(DType::f32, {200, 8, 2}), x = random.tensor(GetParam(), {2, 200, 3, 16});
  Tensor expected = x;
  reference::rope(expected, table, false, records.view());
  for (const PackedRecord& record : records.all) {
    SCOPED_TRACE(record.first);
    Tensor alone(GetParam(), {1, record.length, 3, 16}), angles(DType::f32, {record.length, 8, 2});
    const std::int64_t from = (record.row * 200 + record.first) * 48;
    for (std::int64_t i = 0; i < alone.count(); ++i) alone.set(i, static_cast<float>(x.get(from + i)));
    for (std::int64_t i = 0; i < angles.count(); ++i) angles.set(i, static_cast<float>(table.get(i)));
    reference::rope(alone, angles, false);
    for (std::int64_t i = 0; i < alone.count(); ++i) ASSERT_EQ(expected.get(from + i), alone.get(i)) << i;
  }
  for (const auto& arena : arenas()) {
    Tensor y = x;
    fast::rope(*arena, y, table, false, records.view());
    EXPECT_CLOSE(y, expected);
  }
}

INSTANTIATE_TEST_SUITE_P(Activations, Attention, ::testing::Values(DType::f32, DType::bf16), dtype_name);
INSTANTIATE_TEST_SUITE_P(Activations, AttentionWindow, ::testing::Values(DType::f32, DType::bf16), dtype_name);
INSTANTIATE_TEST_SUITE_P(Windows, AttentionDerivative, ::testing::Values(0, 1, 3));
INSTANTIATE_TEST_SUITE_P(Activations, Rope, ::testing::Values(DType::f32, DType::bf16), dtype_name);

}  // namespace
}  // namespace tandem::testing
