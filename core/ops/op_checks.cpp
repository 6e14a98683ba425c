#include "core/ops/op_checks.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <string>
#include <string_view>
#include <utility>

#include "core/numerics/undo.hpp"

namespace tandem::checks {
namespace {

std::string text(const TensorView& view) { return fmt::format("{} {}", name_of(view.dtype), view.shape.text()); }

/// The checks of one call.
class Operands {
 public:
  explicit Operands(std::string_view operation) : operation_(operation) {}

  [[noreturn]] void fail(std::string_view why) const { throw MisuseError(operation_, why); }

  void that(bool holds, std::string_view why) const {
    if (!holds) fail(why);
  }

  /// A view with data, of this dtype and shape.
  void require(const TensorView& view, std::string_view name, DType dtype, const Shape& shape) const {
    if (!view && shape.count() > 0) fail(fmt::format("{} is empty", name));
    if (view.dtype != dtype || !(view.shape == shape)) {
      fail(fmt::format("{} is {}, should be {} {}", name, text(view), name_of(dtype), shape.text()));
    }
  }

  /// `require` for an operand that may be empty.
  void optional(const TensorView& view, std::string_view name, DType dtype, const Shape& shape) const {
    if (view) require(view, name, dtype, shape);
  }

  /// A view with data, of this rank, f32 or bf16.
  void activations(const TensorView& view, std::string_view name, int rank) const {
    if (!view && view.count() > 0) fail(fmt::format("{} is empty", name));
    if (view.dtype == DType::i32 || view.shape.rank() != rank) {
      fail(fmt::format("{} is {}, should be f32 or bf16 of {} dimensions", name, text(view), rank));
    }
  }

  /// Heads with data of this dtype, whose rows are at least `heads * dim` apart.
  void heads(const HeadsView& view, std::string_view name, DType dtype, std::int64_t heads, std::int64_t dim) const {
    if (view.data == nullptr) fail(fmt::format("{} is empty", name));
    if (view.dtype != dtype || view.row_stride < heads * dim) {
      fail(fmt::format("{} is {} with rows {} apart, should be {} with rows at least {} apart", name,
                       name_of(view.dtype), view.row_stride, name_of(dtype), heads * dim));
    }
  }

  /// Activations alike in type and shape.
  void pointwise(const TensorView& like,
                 std::initializer_list<std::pair<std::string_view, const TensorView&>> others) const {
    that(like && like.dtype != DType::i32, "an operand is empty or i32");
    for (const auto& [name, view] : others) require(view, name, like.dtype, like.shape);
  }

 private:
  std::string operation_;
};

/// A gradient that may be added to in f32 or written whole in bf16.
DType of_gradient(const TensorView& view) { return view.dtype == DType::bf16 ? DType::bf16 : DType::f32; }

void records(const Operands& check, const RecordsView& view) {
  check.that((view.first == nullptr) == (view.end == nullptr), "records without where they begin, or end");
}

void token_rows_of(const Operands& check, const TokenRows& rows) {
  check.that(rows.sequence > 0, "the sequence is not positive");
  records(check, rows.records);
}

void heads_and_window(const Operands& check, const AttentionShape& s) {
  check.that(s.window >= 0, "the window is negative");
  check.that(s.heads % s.kv_heads == 0, "key/value heads do not divide the query heads");
}

void attention_operands(const Operands& check, const AttentionShape& s, const HeadsView& q, const HeadsView& k,
                        const HeadsView& v, const TensorView& out) {
  check.that(s.batch >= 0 && s.sequence > 0 && s.heads > 0 && s.kv_heads > 0 && s.head_dim > 0,
             "a dimension is not positive");
  heads_and_window(check, s);
  records(check, s.records);
  check.heads(q, "q", q.dtype, s.heads, s.head_dim);
  check.that(q.dtype != DType::i32, "q is i32");
  check.heads(k, "k", q.dtype, s.kv_heads, s.head_dim);
  check.heads(v, "v", q.dtype, s.kv_heads, s.head_dim);
  check.require(out, "out", q.dtype, {s.batch, s.sequence, s.heads * s.head_dim});
}

/// Sizes of a routing whose views have been checked.
struct Routed {
  std::int64_t tokens, choices, experts;
  std::int64_t rows() const { return tokens * choices; }
};

Routed routed(const Operands& check, const Routing& r) {
  check.that(r.experts.shape.rank() == 2 && r.begins.shape.rank() == 1 && r.begins.shape[0] > 1,
             "the routing is of no tokens and experts");
  const Routed sizes{r.experts.shape[0], r.experts.shape[1], r.begins.shape[0] - 1};
  check.that(sizes.choices >= 1 && sizes.choices <= sizes.experts, "a token chooses no expert, or more than there are");
  check.that(sizes.rows() <= std::numeric_limits<std::int32_t>::max(), "there are more rows than an i32 can number");
  const Shape by_slot{sizes.tokens, sizes.choices};
  check.require(r.experts, "the routing's experts", DType::i32, by_slot);
  check.require(r.weights, "the routing's weights", DType::f32, by_slot);
  check.require(r.begins, "the routing's begins", DType::i32, {sizes.experts + 1});
  check.require(r.slots, "the routing's slots", DType::i32, {sizes.rows()});
  check.require(r.rows, "the routing's rows", DType::i32, by_slot);
  return sizes;
}

/// (rows, channels) or (tokens, channels); their number.
std::int64_t row_values(const Operands& check, const RowValues& x, std::string_view name, const Routed& sizes) {
  check.activations(x.values, name, 2);
  const std::int64_t channels = x.values.shape[1];
  check.require(x.values, name, x.values.dtype, {x.of_tokens ? sizes.tokens : sizes.rows(), channels});
  return channels;
}

}  // namespace

// -- linear ------------------------------------------------------------------------------------------------------

namespace {

void forward_product(const Operands& check, const TensorView& x, const TensorView& w, const TensorView& bias,
                     const TensorView& y) {
  check.activations(x, "x", 2);
  check.activations(y, "y", 2);
  const std::int64_t out = y.shape[1];
  check.that(y.dtype == x.dtype || y.dtype == DType::f32, "y is bf16 while x is f32");
  check.require(y, "y", y.dtype, {x.shape[0], out});
  check.require(w, "w", DType::bf16, {out, x.shape[1]});
  check.optional(bias, "bias", DType::bf16, {out});
}

}  // namespace

void linear(const TensorView& x, const TensorView& w, const TensorView& bias, const TensorView& y) {
  forward_product(Operands("linear"), x, w, bias, y);
}

void linear_rows(const TensorView& x, const TensorView& w, const TensorView& bias, const TensorView& y) {
  forward_product(Operands("linear_rows"), x, w, bias, y);
}

void linear_backward_input(const TensorView& dy, const TensorView& w, const TensorView& dx) {
  const Operands check("linear_backward_input");
  check.activations(dy, "dy", 2);
  check.activations(dx, "dx", 2);
  check.that(dx.dtype == dy.dtype || dx.dtype == DType::f32, "dx is bf16 while dy is f32");
  check.require(dx, "dx", dx.dtype, {dy.shape[0], dx.shape[1]});
  check.require(w, "w", DType::bf16, {dy.shape[1], dx.shape[1]});
}

void linear_backward_weight(const TensorView& dy, const TensorView& x, const TensorView& dw, const TensorView& dbias) {
  const Operands check("linear_backward_weight");
  check.activations(dy, "dy", 2);
  check.activations(x, "x", 2);
  check.require(x, "x", dy.dtype, {dy.shape[0], x.shape[1]});
  check.optional(dw, "dw", of_gradient(dw), {dy.shape[1], x.shape[1]});
  check.optional(dbias, "dbias", DType::f32, {dy.shape[1]});
}

namespace {

/// A matrix with data, whose sums may be these.
void fp8(const Operands& check, const Fp8Matrix& m, std::string_view name, Fp8Sums sums) {
  check.that(m.data != nullptr, fmt::format("{} is empty", name));
  check.that(m.rows > 0 && m.columns > 0 && m.rows % fp8_multiple == 0 && m.columns % fp8_multiple == 0,
             fmt::format("{} is ({}, {}), no multiples of {}", name, m.rows, m.columns, fp8_multiple));
  check.that(m.sums == sums || m.sums == Fp8Sums::both || sums == Fp8Sums::both,
             fmt::format("{} cannot be summed over its {}", name, sums == Fp8Sums::rows ? "rows" : "columns"));
}

void fp8_factors(const Operands& check, const Fp8Matrix& a, const Fp8Matrix& b) {
  check.that(a.format == Fp8Format::e4m3 || b.format == Fp8Format::e4m3, "both factors are e5m2");
}

}  // namespace

void quantize(const TensorView& x, const Fp8Matrix& to) {
  const Operands check("quantize");
  fp8(check, to, "the matrix", to.sums);
  check.activations(x, "x", 2);
  check.require(x, "x", x.dtype, {to.rows, to.columns});
}

void measure(const MeasuredView& x) {
  const Operands check("measure");
  check.activations(x.values, "x", x.values.shape.rank());
  check.that(x.magnitude != nullptr, "there is no memory for the magnitude");
}

void fp8_linear(const Fp8Matrix& x, const Fp8Matrix& w, const TensorView& bias, const TensorView& residual,
                const TensorView& y) {
  const Operands check("fp8_linear");
  fp8(check, x, "x", Fp8Sums::columns);
  fp8(check, w, "w", Fp8Sums::columns);
  fp8_factors(check, x, w);
  check.that(x.columns == w.columns, fmt::format("x has {} columns, w {}", x.columns, w.columns));
  check.activations(y, "y", 2);
  check.require(y, "y", y.dtype, {x.rows, w.rows});
  check.optional(bias, "bias", DType::bf16, {w.rows});
  check.optional(residual, "residual", y.dtype, {x.rows, w.rows});
}

void fp8_backward_input(const Fp8Matrix& dy, const Fp8Matrix& w, const TensorView& dx) {
  const Operands check("fp8_backward_input");
  fp8(check, dy, "dy", Fp8Sums::columns);
  fp8(check, w, "w", Fp8Sums::rows);
  fp8_factors(check, dy, w);
  check.that(dy.columns == w.rows, fmt::format("dy has {} columns, w {} rows", dy.columns, w.rows));
  check.activations(dx, "dx", 2);
  check.require(dx, "dx", dx.dtype, {dy.rows, w.columns});
}

void fp8_backward_weight(const Fp8Matrix& dy, const Fp8Matrix& x, const TensorView& dw) {
  const Operands check("fp8_backward_weight");
  fp8(check, dy, "dy", Fp8Sums::rows);
  fp8(check, x, "x", Fp8Sums::rows);
  fp8_factors(check, dy, x);
  check.that(dy.rows == x.rows, fmt::format("dy has {} rows, x {}", dy.rows, x.rows));
  check.require(dw, "dw", of_gradient(dw), {dy.columns, x.columns});
}

void head_loss(const HeadLoss& head) {
  const Operands check("head_loss");
  check.activations(head.x, "x", 2);
  const std::int64_t n = head.x.shape[0], channels = head.x.shape[1];
  check.that(head.weight.shape.rank() == 2, "weight is not a matrix");
  const std::int64_t vocabulary = head.weight.shape[0];
  check.require(head.weight, "weight", DType::bf16, {vocabulary, channels});
  check.require(head.targets, "targets", DType::i32, {n});
  check.require(head.losses, "losses", DType::f32, {n});
  check.optional(head.dx, "dx", head.x.dtype, {n, channels});
  check.optional(head.dweight, "dweight", of_gradient(head.dweight), {vocabulary, channels});
  check.that(static_cast<bool>(head.tokens) == static_cast<bool>(head.token_rows), "tokens and token_rows go together");
  check.that(!head.tokens || head.writes_weight(), "token_rows of a dweight that is not written whole");
  check.that(head.rows_at_once >= 0, "rows_at_once is negative");
  check.that(head.rows_at_once == 0 || head.writes_weight(), "rows_at_once of a dweight that is not written whole");
  check.that(!head.tokens || !head.in_slices(), "token_rows of a dweight that is written in slices");
  check.optional(head.tokens, "tokens", DType::i32, {n});
  check.optional(head.token_rows, "token_rows", DType::f32, {n, channels});
  if (!head.sequence_factors) return;
  check.that(head.sequence_factors.shape.rank() == 1, "sequence_factors is no vector");
  const std::int64_t sequences = head.sequence_factors.shape[0];
  check.require(head.sequence_factors, "sequence_factors", DType::f32, {sequences});
  check.that(sequences > 0 && n % sequences == 0, fmt::format("{} rows are not {} sequences alike", n, sequences));
}

void preference_loss(const PreferenceLoss& of) {
  const Operands check("preference_loss");
  check.that(of.losses.shape.rank() == 2 && of.losses.shape[1] > 0, "losses is not a matrix of tokens");
  const std::int64_t sequences = of.losses.shape[0];
  check.require(of.losses, "losses", DType::f32, {sequences, of.losses.shape[1]});
  check.that(sequences % 2 == 0, fmt::format("{} sequences are no pairs", sequences));
  check.that(of.beta > 0.0F, "beta is not positive");
  check.require(of.reference, "reference", DType::f32, {sequences});
  check.require(of.sequence_factors, "sequence_factors", DType::f32, {sequences});
  check.require(of.pairs, "pairs", DType::f32, {sequences / 2, 3});
}

// -- experts -----------------------------------------------------------------------------------------------------

void route(const TensorView& logits, const Routing& routing) {
  const Operands check("route");
  const Routed sizes = routed(check, routing);
  check.require(logits, "logits", DType::f32, {sizes.tokens, sizes.experts});
}

void route_backward(const TensorView& drouting_weights, const TensorView& logits, const Routing& routing,
                    const TensorView& dlogits) {
  const Operands check("route_backward");
  const Routed sizes = routed(check, routing);
  check.require(drouting_weights, "drouting_weights", DType::f32, {sizes.tokens, sizes.choices});
  check.require(logits, "logits", DType::f32, {sizes.tokens, sizes.experts});
  check.activations(dlogits, "dlogits", 2);
  check.require(dlogits, "dlogits", dlogits.dtype, logits.shape);
}

void expert_linear(const RowValues& x, const TensorView& w, const Routing& routing, const TensorView& y) {
  const Operands check("expert_linear");
  const Routed sizes = routed(check, routing);
  const std::int64_t in = row_values(check, x, "x", sizes);
  const std::int64_t out = row_values(check, {y}, "y", sizes);
  check.require(y, "y", x.values.dtype, {sizes.rows(), out});
  check.require(w, "w", DType::bf16, {sizes.experts, out, in});
}

void expert_backward_input(const RowValues& dy, const TensorView& w, const Routing& routing, const TensorView& dx) {
  const Operands check("expert_backward_input");
  const Routed sizes = routed(check, routing);
  const std::int64_t out = row_values(check, dy, "dy", sizes);
  const std::int64_t in = row_values(check, {dx}, "dx", sizes);
  check.require(dx, "dx", dy.values.dtype, {sizes.rows(), in});
  check.require(w, "w", DType::bf16, {sizes.experts, out, in});
}

void expert_backward_weight(const RowValues& dy, const RowValues& x, const Routing& routing, const TensorView& dw) {
  const Operands check("expert_backward_weight");
  const Routed sizes = routed(check, routing);
  const std::int64_t out = row_values(check, dy, "dy", sizes);
  const std::int64_t in = row_values(check, x, "x", sizes);
  check.that(x.values.dtype == dy.values.dtype, "x and dy are of two types");
  check.require(dw, "dw", of_gradient(dw), {sizes.experts, out, in});
}

void expert_swiglu(const TensorView& gate, const TensorView& up, const Routing& routing, const TensorView& y) {
  const Operands check("expert_swiglu");
  row_values(check, {gate}, "gate", routed(check, routing));
  check.pointwise(gate, {{"up", up}, {"y", y}});
}

void expert_swiglu_backward(const TensorView& dy, const TensorView& gate, const TensorView& up, const Routing& routing,
                            const TensorView& dgate, const TensorView& dup, const TensorView& drouting_weights) {
  const Operands check("expert_swiglu_backward");
  const Routed sizes = routed(check, routing);
  row_values(check, {gate}, "gate", sizes);
  check.pointwise(gate, {{"dy", dy}, {"up", up}, {"dgate", dgate}, {"dup", dup}});
  check.require(drouting_weights, "drouting_weights", DType::f32, {sizes.tokens, sizes.choices});
}

void sum_rows(const TensorView& x, const Routing& routing, const TensorView& residual, const TensorView& y) {
  const Operands check("sum_rows");
  const Routed sizes = routed(check, routing);
  const std::int64_t channels = row_values(check, {x}, "x", sizes);
  check.require(y, "y", x.dtype, {sizes.tokens, channels});
  check.optional(residual, "residual", x.dtype, {sizes.tokens, channels});
}

// -- attention ---------------------------------------------------------------------------------------------------

TensorView batched(const TensorView& view, const AttentionShape& s) {
  const Shape flat{s.batch * s.sequence, s.heads * s.head_dim};
  return view.shape == flat ? view.reshaped({s.batch, s.sequence, s.heads * s.head_dim}) : view;
}

void attention(const HeadsView& q, const HeadsView& k, const HeadsView& v, const TensorView& out, const TensorView& lse,
               const AttentionShape& shape) {
  const Operands check("attention");
  attention_operands(check, shape, q, k, v, out);
  check.optional(lse, "lse", DType::f32, {shape.batch, shape.heads, shape.sequence});
}

void attention_backward(const TensorView& dout, const HeadsView& q, const HeadsView& k, const HeadsView& v,
                        const TensorView& out, const TensorView& lse, const HeadsView& dq, const HeadsView& dk,
                        const HeadsView& dv, const AttentionShape& shape) {
  const Operands check("attention_backward");
  attention_operands(check, shape, q, k, v, out);
  check.require(dout, "dout", q.dtype, out.shape);
  check.require(lse, "lse", DType::f32, {shape.batch, shape.heads, shape.sequence});
  check.heads(dq, "dq", q.dtype, shape.heads, shape.head_dim);
  check.heads(dk, "dk", q.dtype, shape.kv_heads, shape.head_dim);
  check.heads(dv, "dv", q.dtype, shape.kv_heads, shape.head_dim);
}

namespace {

/// A cache, and the places of N tokens in it.
void cached(const Operands& check, const KeyValueCache& cache, const CachedTokens& tokens, const AttentionShape& s,
            DType dtype) {
  check.that(s.batch == 1 && s.sequence >= 0 && s.heads > 0 && s.kv_heads > 0 && s.head_dim > 0,
             "the shape is not one row of tokens");
  heads_and_window(check, s);
  check.that(tokens.rows != nullptr && tokens.records, "tokens without places in the cache");
  check.that(cache.keys.shape.rank() == 3, "the cache is not of rows of positions");
  const Shape places{cache.keys.shape[0], cache.keys.shape[1], s.kv_heads * s.head_dim};
  check.require(cache.keys, "the cache's keys", dtype, places);
  check.require(cache.values, "the cache's values", dtype, places);
}

}  // namespace

void store_keys_values(const HeadsView& k, const HeadsView& v, const KeyValueCache& cache, const CachedTokens& tokens,
                       const AttentionShape& shape) {
  const Operands check("store_keys_values");
  cached(check, cache, tokens, shape, k.dtype);
  check.that(k.dtype != DType::i32, "k is i32");
  check.heads(k, "k", k.dtype, shape.kv_heads, shape.head_dim);
  check.heads(v, "v", k.dtype, shape.kv_heads, shape.head_dim);
}

void cached_attention(const HeadsView& q, const KeyValueCache& cache, const CachedTokens& tokens, const TensorView& out,
                      const AttentionShape& shape) {
  const Operands check("cached_attention");
  cached(check, cache, tokens, shape, q.dtype);
  check.that(q.dtype != DType::i32, "q is i32");
  check.heads(q, "q", q.dtype, shape.heads, shape.head_dim);
  check.require(out, "out", q.dtype, {shape.sequence, shape.heads * shape.head_dim});
}

void rope(const TensorView& x, const TensorView& table, const RecordsView& of) {
  const Operands check("rope");
  records(check, of);
  check.activations(x, "x", 4);
  check.that(table.shape.rank() == 3 && table.shape[1] >= 1 && table.shape[1] <= x.shape[3] / 2,
             "the table has no pairs, or more than a head");
  const std::int64_t positions = of ? table.shape[0] : x.shape[1];
  check.require(table, "table", DType::f32, {positions, table.shape[1], 2});
}

// -- norms -------------------------------------------------------------------------------------------------------

void layer_norm(const TensorView& x, const TensorView& weight, const TensorView& bias, const TensorView& y,
                const TensorView& mean, const TensorView& rstd) {
  const Operands check("layer_norm");
  check.activations(x, "x", 2);
  const Shape rows{x.shape[0]}, channels{x.shape[1]};
  check.require(weight, "weight", DType::bf16, channels);
  check.optional(bias, "bias", DType::bf16, channels);
  check.require(y, "y", x.dtype, x.shape);
  check.require(mean, "mean", DType::f32, rows);
  check.require(rstd, "rstd", DType::f32, rows);
}

void layer_norm_backward(const TensorView& dy, const TensorView& x, const TensorView& weight, const TensorView& mean,
                         const TensorView& rstd, const TensorView& dx, const TensorView& dweight,
                         const TensorView& dbias) {
  const Operands check("layer_norm_backward");
  check.activations(x, "x", 2);
  const Shape rows{x.shape[0]}, channels{x.shape[1]};
  check.require(dy, "dy", x.dtype, x.shape);
  check.require(weight, "weight", DType::bf16, channels);
  check.require(mean, "mean", DType::f32, rows);
  check.require(rstd, "rstd", DType::f32, rows);
  check.require(dx, "dx", x.dtype, x.shape);
  check.optional(dweight, "dweight", DType::f32, channels);
  check.optional(dbias, "dbias", DType::f32, channels);
}

void rms_norm(const TensorView& x, const TensorView& weight, const TensorView& y, const TensorView& rstd) {
  const Operands check("rms_norm");
  check.activations(x, "x", 2);
  check.require(weight, "weight", DType::bf16, {x.shape[1]});
  check.require(y, "y", x.dtype, x.shape);
  check.require(rstd, "rstd", DType::f32, {x.shape[0]});
}

void rms_norm_backward(const TensorView& dy, const TensorView& x, const TensorView& weight, const TensorView& rstd,
                       const TensorView& dx, const TensorView& dweight) {
  const Operands check("rms_norm_backward");
  check.activations(x, "x", 2);
  check.require(dy, "dy", x.dtype, x.shape);
  check.require(weight, "weight", DType::bf16, {x.shape[1]});
  check.require(rstd, "rstd", DType::f32, {x.shape[0]});
  check.require(dx, "dx", x.dtype, x.shape);
  check.optional(dweight, "dweight", DType::f32, {x.shape[1]});
}

// -- pointwise ---------------------------------------------------------------------------------------------------

void gelu(const TensorView& x, const TensorView& y) { Operands("gelu").pointwise(x, {{"y", y}}); }

void gelu_backward(const TensorView& dy, const TensorView& x, const TensorView& dx) {
  Operands("gelu_backward").pointwise(x, {{"dy", dy}, {"dx", dx}});
}

void gated(std::string_view name, const TensorView& gate, const TensorView& up, const TensorView& y) {
  Operands(name).pointwise(gate, {{"up", up}, {"y", y}});
}

void gated_backward(std::string_view name, const TensorView& dy, const TensorView& gate, const TensorView& up,
                    const TensorView& dgate, const TensorView& dup) {
  Operands(name).pointwise(gate, {{"dy", dy}, {"up", up}, {"dgate", dgate}, {"dup", dup}});
}

void add(const TensorView& a, const TensorView& b, const TensorView& y) {
  Operands("add").pointwise(a, {{"b", b}, {"y", y}});
}

void add_scaled(const TensorView& x, const TensorView& residual, const TensorView& y) {
  Operands("add_scaled").pointwise(x, {{"residual", residual ? residual : x}, {"y", y}});
}

void dropout(const TensorView& x, const Dropout& of, const TensorView& y, bool accumulate) {
  const Operands check("dropout");
  check.that(of.rate >= 0.0F && of.rate < 1.0F, fmt::format("the rate is {}, not from 0 to below 1", of.rate));
  check.pointwise(x, {{"y", y}});
  check.that(!accumulate || x.data != y.data, "x is added to itself");
}

void decode(const CodedWeight& from, const TensorView& weight) {
  const Operands check("decode");
  check.that(from.code != WeightCode::none, "the weight has no code");
  const int rank = weight.shape.rank();
  check.that(rank == 2 || rank == 3, fmt::format("weight is {}, should be (O, I) or (E, O, I)", text(weight)));
  check.require(weight, "weight", DType::bf16, weight.shape);
  const bool is_there = from.codes != nullptr && from.scales != nullptr;
  check.that(is_there || weight.count() == 0, "there are no codes or no scales");
}

// -- embedding ---------------------------------------------------------------------------------------------------

void embedding(const TensorView& tokens, const TensorView& table, const TensorView& positions, const TokenRows& rows,
               const TensorView& out) {
  const Operands check("embedding");
  check.activations(out, "out", 2);
  const std::int64_t n = out.shape[0], channels = out.shape[1];
  check.that(tokens.count() == n, "tokens " + tokens.shape.text() + " against out " + out.shape.text());
  check.require(tokens, "tokens", DType::i32, tokens.shape);
  token_rows_of(check, rows);
  check.that(table.shape.rank() == 2, "table is not a matrix");
  check.require(table, "table", DType::bf16, {table.shape[0], channels});
  check.that(
      !positions || (positions.shape.rank() == 2 && (rows.records || positions.shape[0] >= std::min(rows.sequence, n))),
      "fewer positions than the sequence: " + positions.shape.text());
  check.optional(positions, "positions", DType::bf16, {positions.shape[0], channels});
}

void embedding_backward(const TensorView& dout, const TensorView& tokens, const TokenRows& rows,
                        const TensorView& dtable, const TensorView& dpositions, const TensorView& token_rows) {
  const Operands check("embedding_backward");
  check.activations(dout, "dout", 2);
  const std::int64_t n = dout.shape[0], channels = dout.shape[1];
  check.that(tokens.count() == n, "tokens " + tokens.shape.text() + " against dout " + dout.shape.text());
  check.require(tokens, "tokens", DType::i32, tokens.shape);
  token_rows_of(check, rows);
  check.optional(dtable, "dtable", of_gradient(dtable), {dtable.shape[0], channels});
  check.that(!dpositions || (dpositions.shape.rank() == 2 && dpositions.shape[0] >= std::min(rows.sequence, n)),
             "fewer positions than the sequence: " + dpositions.shape.text());
  check.optional(dpositions, "dpositions", DType::f32, {dpositions.shape[0], channels});
  check.that(!token_rows || (dtable && dtable.dtype == DType::bf16), "token_rows of a dtable that is added to");
  check.optional(token_rows, "token_rows", DType::f32, {n, channels});
}

void adamw(const AdamPiece& piece) {
  const Operands check("adamw");
  check.that(piece.format != StateFormat::byte_moments || piece.index % coded_record == 0,
             "moments in a byte each from within a record, at element " + std::to_string(piece.index));
}

void speculation(const AdamPiece& piece, const AdamCoefficients& c, const UndoPiece& undo) {
  adamw(piece);
  const Operands check("an update that may be taken back");
  check.that(!is_lion(piece.format), "it is of Lion");
  check.that(numerics::is_invertible(c), "beta below 0.5, or lr times weight decay above it");
  check.that(piece.count % layout_quantum == 0 && undo.begin % layout_quantum == 0 && undo.range % layout_quantum == 0,
             "parts of blocks");
  check.that(piece.count <= undo.range - undo.begin, "more elements than the record has");
  check.that(undo.memory != nullptr && undo.block_norms != nullptr, "no memory");
}

}  // namespace tandem::checks
