#include "cpu_ops/host_ops.hpp"

#include <algorithm>
#include <utility>

#include "cpu_ops/checks.hpp"
#include "cpu_ops/kernels.hpp"

namespace tandem {

using checks::Operands;

HostOps::HostOps(std::shared_ptr<Parallel> parallel, UpdateKernels& kernels, Enqueue enqueue)
    : parallel_(std::move(parallel)), kernels_(kernels), enqueue_(std::move(enqueue)) {}

std::size_t HostOps::workspace_bytes(const WorkspaceNeeds& needs) const {
  const int threads = parallel_->threads();
  return align_up(
      std::max({fast::linear_scratch(needs.tokens, needs.channels, needs.channels, needs.activations, threads),
                fast::head_loss_scratch(needs.tokens, needs.channels, needs.vocabulary, needs.activations, threads),
                fast::attention_scratch(needs.sequence, needs.head_dim, threads),
                fast::attention_backward_scratch(needs.sequence, needs.head_dim, threads)}));
}

void HostOps::bind_workspace(void* data, std::size_t bytes) { workspace_ = {static_cast<std::byte*>(data), bytes}; }

// -- linear ------------------------------------------------------------------------------------------------------

void HostOps::linear(TensorView x, TensorView w, TensorView bias, TensorView y, StreamView stream) {
  const Operands check("linear");
  check.activations(x, "x", 2);
  check.activations(y, "y", 2);
  const std::int64_t out = y.shape[1];
  check.that(y.dtype == x.dtype || y.dtype == DType::f32, "y is bf16 while x is f32");
  check.require(y, "y", y.dtype, {x.shape[0], out});
  check.require(w, "w", DType::bf16, {out, x.shape[1]});
  check.optional(bias, "bias", DType::bf16, {out});
  enqueue_(stream, "linear",
           [this, x, w, bias, y, lent = workspace_] { fast::linear(*parallel_, lent, x, w, bias, y); });
}

void HostOps::linear_backward_input(TensorView dy, TensorView w, TensorView dx, bool accumulate, StreamView stream) {
  const Operands check("linear_backward_input");
  check.activations(dy, "dy", 2);
  check.activations(dx, "dx", 2);
  check.require(dx, "dx", dy.dtype, {dy.shape[0], dx.shape[1]});
  check.require(w, "w", DType::bf16, {dy.shape[1], dx.shape[1]});
  enqueue_(stream, "linear_backward_input", [this, dy, w, dx, accumulate, lent = workspace_] {
    fast::linear_backward_input(*parallel_, lent, dy, w, dx, accumulate);
  });
}

void HostOps::linear_backward_weight(TensorView dy, TensorView x, TensorView dw, TensorView dbias, StreamView stream) {
  const Operands check("linear_backward_weight");
  check.activations(dy, "dy", 2);
  check.activations(x, "x", 2);
  check.require(x, "x", dy.dtype, {dy.shape[0], x.shape[1]});
  check.require(dw, "dw", DType::f32, {dy.shape[1], x.shape[1]});
  check.optional(dbias, "dbias", DType::f32, {dy.shape[1]});
  enqueue_(stream, "linear_backward_weight", [this, dy, x, dw, dbias, lent = workspace_] {
    fast::linear_backward_weight(*parallel_, lent, dy, x, dw, dbias);
  });
}

void HostOps::head_loss(const HeadLoss& head, StreamView stream) {
  const Operands check("head_loss");
  check.activations(head.x, "x", 2);
  const std::int64_t n = head.x.shape[0], channels = head.x.shape[1];
  check.that(head.weight.shape.rank() == 2, "weight is not a matrix");
  const std::int64_t vocabulary = head.weight.shape[0];
  check.require(head.weight, "weight", DType::bf16, {vocabulary, channels});
  check.require(head.targets, "targets", DType::i32, {n});
  check.require(head.losses, "losses", DType::f32, {n});
  check.optional(head.dx, "dx", head.x.dtype, {n, channels});
  check.optional(head.dweight, "dweight", DType::f32, {vocabulary, channels});
  check.that(head.dx || !head.dweight, "dweight is asked for without dx");
  enqueue_(stream, "head_loss", [this, head, lent = workspace_] { fast::head_loss(*parallel_, lent, head); });
}

// -- attention ---------------------------------------------------------------------------------------------------

namespace {

void check_attention(const Operands& check, const AttentionShape& s, const HeadsView& q, const HeadsView& k,
                     const HeadsView& v, const TensorView& out) {
  check.that(s.batch >= 0 && s.sequence > 0 && s.heads > 0 && s.kv_heads > 0 && s.head_dim > 0,
             "a dimension is not positive");
  check.that(s.heads % s.kv_heads == 0, "key/value heads do not divide the query heads");
  check.heads(q, "q", q.dtype, s.heads, s.head_dim);
  check.that(q.dtype != DType::i32, "q is i32");
  check.heads(k, "k", q.dtype, s.kv_heads, s.head_dim);
  check.heads(v, "v", q.dtype, s.kv_heads, s.head_dim);
  check.require(out, "out", q.dtype, {s.batch, s.sequence, s.heads * s.head_dim});
}

/// (B, T, H D) whether it was passed so or as (B T, H D).
TensorView batched(const TensorView& view, const AttentionShape& s) {
  const Shape flat{s.batch * s.sequence, s.heads * s.head_dim};
  return view.shape == flat ? view.reshaped({s.batch, s.sequence, s.heads * s.head_dim}) : view;
}

}  // namespace

void HostOps::attention(HeadsView q, HeadsView k, HeadsView v, TensorView out, TensorView lse,
                        const AttentionShape& shape, StreamView stream) {
  const Operands check("attention");
  out = batched(out, shape);
  check_attention(check, shape, q, k, v, out);
  check.optional(lse, "lse", DType::f32, {shape.batch, shape.heads, shape.sequence});
  enqueue_(stream, "attention", [this, q, k, v, out, lse, shape, lent = workspace_] {
    fast::attention(*parallel_, lent, q, k, v, out, lse, shape);
  });
}

void HostOps::attention_backward(TensorView dout, HeadsView q, HeadsView k, HeadsView v, TensorView out, TensorView lse,
                                 HeadsView dq, HeadsView dk, HeadsView dv, const AttentionShape& shape,
                                 StreamView stream) {
  const Operands check("attention_backward");
  out = batched(out, shape);
  dout = batched(dout, shape);
  check_attention(check, shape, q, k, v, out);
  check.require(dout, "dout", q.dtype, out.shape);
  check.require(lse, "lse", DType::f32, {shape.batch, shape.heads, shape.sequence});
  check.heads(dq, "dq", q.dtype, shape.heads, shape.head_dim);
  check.heads(dk, "dk", q.dtype, shape.kv_heads, shape.head_dim);
  check.heads(dv, "dv", q.dtype, shape.kv_heads, shape.head_dim);
  enqueue_(stream, "attention_backward", [this, dout, q, k, v, out, lse, dq, dk, dv, shape, lent = workspace_] {
    fast::attention_backward(*parallel_, lent, dout, q, k, v, out, lse, dq, dk, dv, shape);
  });
}

void HostOps::rope(TensorView x, TensorView table, bool inverse, StreamView stream) {
  const Operands check("rope");
  check.activations(x, "x", 4);
  check.that(x.shape[3] % 2 == 0, "the head dimension is odd");
  check.require(table, "table", DType::f32, {x.shape[1], x.shape[3] / 2, 2});
  enqueue_(stream, "rope", [this, x, table, inverse] { fast::rope(*parallel_, x, table, inverse); });
}

// -- norms -------------------------------------------------------------------------------------------------------

void HostOps::layer_norm(TensorView x, TensorView weight, TensorView bias, TensorView y, TensorView mean,
                         TensorView rstd, float eps, StreamView stream) {
  const Operands check("layer_norm");
  check.activations(x, "x", 2);
  const Shape rows{x.shape[0]}, channels{x.shape[1]};
  check.require(weight, "weight", DType::bf16, channels);
  check.optional(bias, "bias", DType::bf16, channels);
  check.require(y, "y", x.dtype, x.shape);
  check.require(mean, "mean", DType::f32, rows);
  check.require(rstd, "rstd", DType::f32, rows);
  enqueue_(stream, "layer_norm", [this, x, weight, bias, y, mean, rstd, eps] {
    fast::layer_norm(*parallel_, x, weight, bias, y, mean, rstd, eps);
  });
}

void HostOps::layer_norm_backward(TensorView dy, TensorView x, TensorView weight, TensorView mean, TensorView rstd,
                                  TensorView dx, bool accumulate, TensorView dweight, TensorView dbias,
                                  StreamView stream) {
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
  enqueue_(stream, "layer_norm_backward", [this, dy, x, weight, mean, rstd, dx, accumulate, dweight, dbias] {
    fast::layer_norm_backward(*parallel_, dy, x, weight, mean, rstd, dx, accumulate, dweight, dbias);
  });
}

void HostOps::rms_norm(TensorView x, TensorView weight, TensorView y, TensorView rstd, float eps, StreamView stream) {
  const Operands check("rms_norm");
  check.activations(x, "x", 2);
  check.require(weight, "weight", DType::bf16, {x.shape[1]});
  check.require(y, "y", x.dtype, x.shape);
  check.require(rstd, "rstd", DType::f32, {x.shape[0]});
  enqueue_(stream, "rms_norm",
           [this, x, weight, y, rstd, eps] { fast::rms_norm(*parallel_, x, weight, y, rstd, eps); });
}

void HostOps::rms_norm_backward(TensorView dy, TensorView x, TensorView weight, TensorView rstd, TensorView dx,
                                bool accumulate, TensorView dweight, StreamView stream) {
  const Operands check("rms_norm_backward");
  check.activations(x, "x", 2);
  check.require(dy, "dy", x.dtype, x.shape);
  check.require(weight, "weight", DType::bf16, {x.shape[1]});
  check.require(rstd, "rstd", DType::f32, {x.shape[0]});
  check.require(dx, "dx", x.dtype, x.shape);
  check.optional(dweight, "dweight", DType::f32, {x.shape[1]});
  enqueue_(stream, "rms_norm_backward", [this, dy, x, weight, rstd, dx, accumulate, dweight] {
    fast::rms_norm_backward(*parallel_, dy, x, weight, rstd, dx, accumulate, dweight);
  });
}

// -- pointwise ---------------------------------------------------------------------------------------------------

namespace {

void check_pointwise(const Operands& check, const TensorView& like,
                     std::initializer_list<std::pair<std::string_view, TensorView>> others) {
  check.that(like && like.dtype != DType::i32, "an operand is empty or i32");
  for (const auto& [name, view] : others) check.require(view, name, like.dtype, like.shape);
}

}  // namespace

void HostOps::gelu(TensorView x, TensorView y, StreamView stream) {
  check_pointwise(Operands("gelu"), x, {{"y", y}});
  enqueue_(stream, "gelu", [this, x, y] { fast::gelu(*parallel_, x, y); });
}

void HostOps::gelu_backward(TensorView dy, TensorView x, TensorView dx, StreamView stream) {
  check_pointwise(Operands("gelu_backward"), x, {{"dy", dy}, {"dx", dx}});
  enqueue_(stream, "gelu_backward", [this, dy, x, dx] { fast::gelu_backward(*parallel_, dy, x, dx); });
}

void HostOps::swiglu(TensorView gate, TensorView up, TensorView y, StreamView stream) {
  check_pointwise(Operands("swiglu"), gate, {{"up", up}, {"y", y}});
  enqueue_(stream, "swiglu", [this, gate, up, y] { fast::swiglu(*parallel_, gate, up, y); });
}

void HostOps::swiglu_backward(TensorView dy, TensorView gate, TensorView up, TensorView dgate, TensorView dup,
                              StreamView stream) {
  check_pointwise(Operands("swiglu_backward"), gate, {{"dy", dy}, {"up", up}, {"dgate", dgate}, {"dup", dup}});
  enqueue_(stream, "swiglu_backward",
           [this, dy, gate, up, dgate, dup] { fast::swiglu_backward(*parallel_, dy, gate, up, dgate, dup); });
}

void HostOps::add(TensorView a, TensorView b, TensorView y, StreamView stream) {
  check_pointwise(Operands("add"), a, {{"b", b}, {"y", y}});
  enqueue_(stream, "add", [this, a, b, y] { fast::add(*parallel_, a, b, y); });
}

// -- embedding ---------------------------------------------------------------------------------------------------

void HostOps::embedding(TensorView tokens, TensorView table, TensorView positions, std::int64_t sequence,
                        TensorView out, StreamView stream) {
  const Operands check("embedding");
  check.activations(out, "out", 2);
  const std::int64_t n = out.shape[0], channels = out.shape[1];
  check.that(tokens.count() == n, "tokens " + tokens.shape.text() + " against out " + out.shape.text());
  check.require(tokens, "tokens", DType::i32, tokens.shape);
  check.that(sequence > 0, "the sequence is not positive");
  check.that(table.shape.rank() == 2, "table is not a matrix");
  check.require(table, "table", DType::bf16, {table.shape[0], channels});
  check.that(!positions || (positions.shape.rank() == 2 && positions.shape[0] >= std::min(sequence, n)),
             "fewer positions than the sequence: " + positions.shape.text());
  check.optional(positions, "positions", DType::bf16, {positions.shape[0], channels});
  enqueue_(stream, "embedding", [this, tokens, table, positions, sequence, out] {
    fast::embedding(*parallel_, tokens, table, positions, sequence, out);
  });
}

void HostOps::embedding_backward(TensorView dout, TensorView tokens, std::int64_t sequence, TensorView dtable,
                                 TensorView dpositions, StreamView stream) {
  const Operands check("embedding_backward");
  check.activations(dout, "dout", 2);
  const std::int64_t n = dout.shape[0], channels = dout.shape[1];
  check.that(tokens.count() == n, "tokens " + tokens.shape.text() + " against dout " + dout.shape.text());
  check.require(tokens, "tokens", DType::i32, tokens.shape);
  check.that(sequence > 0, "the sequence is not positive");
  check.optional(dtable, "dtable", DType::f32, {dtable.shape[0], channels});
  check.that(!dpositions || (dpositions.shape.rank() == 2 && dpositions.shape[0] >= std::min(sequence, n)),
             "fewer positions than the sequence: " + dpositions.shape.text());
  check.optional(dpositions, "dpositions", DType::f32, {dpositions.shape[0], channels});
  enqueue_(stream, "embedding_backward", [this, dout, tokens, sequence, dtable, dpositions] {
    fast::embedding_backward(*parallel_, dout, tokens, sequence, dtable, dpositions);
  });
}

// -- optimizer ---------------------------------------------------------------------------------------------------

void HostOps::adamw(const AdamPiece& piece, const AdamCoefficients& c, StreamView stream) {
  enqueue_(stream, "adamw", [this, piece, c] { kernels_.adamw(piece, c); });
}
void HostOps::weights_of_master(const float* master, bf16* weight, std::int64_t count, StreamView stream) {
  enqueue_(stream, "weights_of_master", [=, this] { kernels_.weights_of_master(master, weight, count); });
}
void HostOps::accumulate(float* sum, const bf16* gradient, bool first, std::int64_t count, StreamView stream) {
  enqueue_(stream, "accumulate", [=, this] { kernels_.accumulate(sum, gradient, first, count); });
}
void HostOps::round(const float* sum, bf16* gradient, std::int64_t count, StreamView stream) {
  enqueue_(stream, "round", [=, this] { kernels_.round(sum, gradient, count); });
}
void HostOps::norm_blocks(const bf16* gradient, std::int64_t count, double* partial, StreamView stream) {
  enqueue_(stream, "norm_blocks", [=, this] { kernels_.norm_blocks(gradient, count, partial); });
}

}  // namespace tandem
