// The attention kernels of tandem's own, also where the device has a library for it.
#include <cmath>
#include <optional>
#include <vector>

#include "cpu_ops/reference/reference.hpp"
#include "gpu_ops/base/attention.hpp"
#include "gpu_ops/base/scratch.hpp"
#include "gpu_ops/device/native_stream.hpp"
#include "tests/cpu_ops/packed_records.hpp"
#include "tests/gpu_ops/kernels/bench.hpp"

namespace tandem::testing {
namespace {

/// Operands and results of one call, on the host.
struct Problem {
  AttentionShape shape;
  Tensor q, k, v, dout, out, lse, dq, dk, dv;
  const PackedRecords* records = nullptr;  ///< records that the rows are packed with

  Problem(DType dtype, const AttentionShape& s, const PackedRecords* packed = nullptr) : Problem(dtype, s, Random(11)) {
    records = packed;
    if (packed != nullptr) shape.records = packed->view();
  }

 private:
  static Shape rows(const AttentionShape& s, std::int64_t heads) { return {s.batch, s.sequence, heads * s.head_dim}; }
  Problem(DType dtype, const AttentionShape& s, Random random)
      : shape(s),
        q(random.tensor(dtype, rows(s, s.heads))),
        k(random.tensor(dtype, rows(s, s.kv_heads))),
        v(random.tensor(dtype, rows(s, s.kv_heads))),
        dout(random.tensor(dtype, rows(s, s.heads))),
        out(dtype, rows(s, s.heads)),
        lse(DType::f32, {s.batch, s.heads, s.sequence}),
        dq(dtype, rows(s, s.heads)),
        dk(dtype, rows(s, s.kv_heads)),
        dv(dtype, rows(s, s.kv_heads)) {}
};

HeadsView heads(const TensorView& of) { return {of.data, of.dtype, of.shape[2]}; }

/// Compares the bits of the rows of tokens [first, last).
void expect_same_rows(const Tensor& actual, const Tensor& expected, std::int64_t first, std::int64_t last) {
  const std::size_t row = static_cast<std::size_t>(expected.view().shape[2]) * size_of(expected.dtype());
  const auto rows = [&](const Tensor& of) {
    return std::vector<std::uint8_t>(of.bytes().begin() + first * static_cast<std::ptrdiff_t>(row),
                                     of.bytes().begin() + last * static_cast<std::ptrdiff_t>(row));
  };
  EXPECT_EQ(rows(actual), rows(expected));
}

/// Other values for all tokens but a record's.
void replace_others(Tensor& rows, const PackedRecord& record, Random& random) {
  const Shape shape = rows.view().shape;
  const std::int64_t first = record.row * shape[1] + record.first;
  for (std::int64_t token = 0; token < shape[0] * shape[1]; ++token) {
    for (std::int64_t i = 0; i < shape[2]; ++i) {
      const float value = random.normal(3.0F);
      if (token < first || token >= first + record.length) rows.set(token * shape[2] + i, value);
    }
  }
}

class PlainAttention : public OpsTest {
 protected:
  /// out, lse, dq, dk and dv.
  std::vector<Tensor> run(const Problem& p, const std::optional<gpu::AttentionLimits>& limits) {
    AttentionShape s = p.shape;
    const PackedRecords none(s.sequence, {});
    const PackedRecords& records = p.records ? *p.records : none;
    const Operand first = bench().put(records.first), end = bench().put(records.end);
    if (p.records) s.records = {first.as<std::int32_t>(), end.as<std::int32_t>()};
    const auto floats = static_cast<std::int64_t>(gpu::plain_attention_scratch(s.batch * s.sequence, s.heads) / 4);
    const Operand scratch = bench().put(Tensor(DType::f32, {floats}));
    const Operand q = bench().put(p.q), k = bench().put(p.k), v = bench().put(p.v), dout = bench().put(p.dout);
    const Operand out = bench().put(p.out), lse = bench().put(p.lse);
    const Operand dq = bench().put(p.dq), dk = bench().put(p.dk), dv = bench().put(p.dv);
    CUstream_st* const native = native_stream(stream());
    gpu::plain_attention({heads(q), heads(k), heads(v), out, lse, s}, native, limits);
    gpu::plain_attention_backward({dout, heads(q), heads(k), heads(v), out, lse, heads(dq), heads(dk), heads(dv), s},
                                  scratch.view().data, native, limits);
    std::vector<Tensor> results;
    for (const Operand* of : {&out, &lse, &dq, &dk, &dv}) results.push_back(bench().get(*of));
    return results;
  }

  /// Forward and backward are those of the reference, under all schedules. `packed`: records of the rows.
  void expect_reference(const AttentionShape& s, const PackedRecords* packed = nullptr) {
    const Problem p(dtype(), s, packed), expected(dtype(), s, packed);
    reference::attention(heads(p.q), heads(p.k), heads(p.v), expected.out, expected.lse, expected.shape);
    reference::attention_backward(p.dout, heads(p.q), heads(p.k), heads(p.v), expected.out, expected.lse,
                                  heads(expected.dq), heads(expected.dk), heads(expected.dv), expected.shape);
    const auto results = under_all_schedules([&] { return run(p, {}); });
    EXPECT_WITHIN(results[0], expected.out, dtype(), true);
    EXPECT_WITHIN(results[1], expected.lse, dtype(), false);
    EXPECT_WITHIN(results[2], expected.dq, dtype(), true);
    EXPECT_WITHIN(results[3], expected.dk, dtype(), true);
    EXPECT_WITHIN(results[4], expected.dv, dtype(), true);
  }
};

TEST_P(PlainAttention, IsTheReference) {
  for (const AttentionShape& s : {AttentionShape{1, 131, 4, 2, 64, 0.125F},
                                  {1, 150, 2, 1, 128, 0.1F},
                                  {2, 97, 1, 1, 24, 0.2F},
                                  {1, 131, 2, 1, 200, 0.07F},
                                  {1, 97, 1, 1, 64, 0.125F, 37},
                                  {1, 131, 2, 1, 64, -0.125F, 100},
                                  {1, 70, 1, 1, 80, -0.11F},
                                  {1, 70, 1, 1, 64, 0.0F, 40},
                                  {1, 70, 1, 1, 128, 0.1F, 2},
                                  {1, 97, 2, 1, 256, 0.06F, 17}}) {
    SCOPED_TRACE(std::to_string(s.sequence) + " tokens, dim " + std::to_string(s.head_dim) + ", window " +
                 std::to_string(s.window));
    expect_reference(s);
  }
}

/// Shapes of two rows of 200 tokens: every size of tile, heads that share keys, negative scales, windows.
const AttentionShape packed_shapes[] = {{2, 200, 4, 2, 64, 0.125F},      {2, 200, 2, 1, 128, 0.1F, 37},
                                        {2, 200, 1, 1, 24, 0.2F, 64},    {2, 200, 2, 1, 200, 0.07F},
                                        {2, 200, 2, 1, 64, -0.125F, 70}, {2, 200, 1, 1, 80, -0.11F}};

TEST_P(PlainAttention, KeepsPackedRecordsApart) {
  const PackedRecords records = two_packed_rows();
  for (const AttentionShape& s : packed_shapes) {
    SCOPED_TRACE("dim " + std::to_string(s.head_dim) + ", window " + std::to_string(s.window));
    expect_reference(s, &records);
  }
}

// A record has the same bits whatever its neighbours hold: none of it comes to them, nor of them to it.
TEST_P(PlainAttention, APackedRecordDoesNotDependOnOthers) {
  const PackedRecords records(131, {{1, 64, 3, 63}});
  for (const AttentionShape& s : {AttentionShape{1, 131, 2, 1, 64, 0.125F, 37}, {1, 131, 1, 1, 128, 0.1F}}) {
    const Problem clean(dtype(), s, &records);
    const std::vector<Tensor> expected = run(clean, {});
    for (const PackedRecord& record : records.all) {
      SCOPED_TRACE("dim " + std::to_string(s.head_dim) + ", record from " + std::to_string(record.first));
      Problem other = clean;
      Random random(15);
      for (Tensor* of : {&other.q, &other.k, &other.v, &other.dout}) replace_others(*of, record, random);
      const std::vector<Tensor> results = run(other, {});
      const std::int64_t first = record.row * s.sequence + record.first;
      for (const std::size_t result : {0U, 2U, 3U, 4U}) {
        expect_same_rows(results[result], expected[result], first, first + record.length);
      }
    }
  }
}

// Long sequences go in several launches: here of as few tiles as it takes to have several of short ones.
TEST_P(PlainAttention, HasTheSameBitsInAnyNumberOfLaunches) {
  // 3 tiles of f32, 2 of bf16, of each of 8 heads, and of each of 4 with keys.
  const Problem p(dtype(), {2, 71, 4, 2, 16, 0.25F});
  const std::vector<Tensor> expected = run(p, {});
  for (const std::int64_t tiles : {1, 5, 12, 23}) {
    SCOPED_TRACE(tiles);
    const std::vector<Tensor> results = run(p, gpu::AttentionLimits{.multiply_adds = 1.0, .least_tiles = tiles});
    for (std::size_t i = 0; i < results.size(); ++i) EXPECT_SAME_BITS(results[i], expected[i]);
  }
}

/// Sets the rows of tokens [first, last) of a batch of one to what shows in every sum that it is part of, with whatever
/// weight.
void spoil(Tensor& rows, std::int64_t first, std::int64_t last) {
  const std::int64_t width = rows.view().shape[2];
  for (std::int64_t i = first * width; i < last * width; ++i) rows.set(i, NAN);
}

TEST_P(PlainAttention, TilesOutsideOfTheWindowAreLeftOut) {
  // The last three of 131 tokens see none of the first 64, which are whole tiles of any size, nor are seen by them.
  constexpr std::int64_t tile = 64, last = 2 * tile, tokens = 131;
  const Problem clean(dtype(), {1, tokens, 1, 1, 16, 0.25F, 37});
  Problem no_keys = clean, no_queries = clean;
  for (Tensor* of : {&no_keys.k, &no_keys.v}) spoil(*of, 0, tile);
  for (Tensor* of : {&no_queries.q, &no_queries.dout}) spoil(*of, last, tokens);
  const std::vector<Tensor> expected = run(clean, {}), of_queries = run(no_keys, {}), of_keys = run(no_queries, {});
  for (const std::size_t result : {0U, 2U}) expect_same_rows(of_queries[result], expected[result], last, tokens);
  for (const std::size_t result : {3U, 4U}) expect_same_rows(of_keys[result], expected[result], 0, tile);
  EXPECT_TRUE(std::isnan(of_queries[0].get(0))) << "who sees them is spoilt";
  EXPECT_TRUE(std::isnan(of_keys[3].get((tokens - 1) * 16)));
}

INSTANTIATE_TEST_SUITE_P(Activations, PlainAttention, ::testing::Values(DType::f32, DType::bf16), dtype_name);

}  // namespace
}  // namespace tandem::testing
