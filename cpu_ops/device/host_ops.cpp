#include "cpu_ops/device/host_ops.hpp"

#include <algorithm>
#include <utility>

#include "core/ops/op_checks.hpp"
#include "cpu_ops/kernels/kernels.hpp"

namespace tandem {

HostOps::HostOps(std::shared_ptr<Parallel> parallel, UpdateKernels& kernels, Enqueue enqueue)
    : parallel_(std::move(parallel)), kernels_(kernels), enqueue_(std::move(enqueue)) {}

std::size_t HostRules::workspace_bytes(const WorkspaceNeeds& needs) const {
  return align_up(
      std::max({fast::linear_scratch(needs.tokens, needs.channels, needs.channels, needs.activations, threads_),
                needs.experts > 0 ? fast::expert_scratch(needs.tokens, needs.channels, needs.channels, threads_) : 0,
                fast::head_loss_scratch(needs.tokens, needs.channels, needs.vocabulary, needs.activations, threads_,
                                        needs.gradients ? needs.head_rows : 0, needs.token_rows),
                needs.cached ? fast::cached_attention_scratch(needs.head_dim, threads_) : 0,
                fast::attention_scratch(needs.sequence, needs.head_dim, threads_),
                fast::attention_backward_scratch(needs.sequence, needs.head_dim, threads_)}));
}

std::size_t HostOps::workspace_bytes(const WorkspaceNeeds& needs) const {
  return HostRules(parallel_->threads()).workspace_bytes(needs);
}

std::size_t HostRules::fp8_bytes(std::int64_t rows, std::int64_t columns, Fp8Sums) const {
  return fast::fp8_bytes(rows, columns);
}
std::size_t HostOps::fp8_bytes(std::int64_t rows, std::int64_t columns, Fp8Sums) const {
  return fast::fp8_bytes(rows, columns);
}
std::size_t HostRules::magnitude_bytes() const { return fast::magnitude_bytes; }
std::size_t HostOps::magnitude_bytes() const { return fast::magnitude_bytes; }

void HostOps::bind_workspace(void* data, std::size_t bytes) { workspace_ = {static_cast<std::byte*>(data), bytes}; }

// -- linear ------------------------------------------------------------------------------------------------------

void HostOps::linear(TensorView x, TensorView w, TensorView bias, TensorView y, StreamView stream) {
  checks::linear(x, w, bias, y);
  enqueue_(stream, "linear",
           [this, x, w, bias, y, lent = workspace_] { fast::linear(*parallel_, lent, x, w, bias, y); });
}

void HostOps::linear_rows(TensorView x, TensorView w, TensorView bias, TensorView y, StreamView stream) {
  checks::linear_rows(x, w, bias, y);
  enqueue_(stream, "linear_rows", [this, x, w, bias, y] { fast::linear_rows(*parallel_, x, w, bias, y); });
}

void HostOps::linear_backward_input(TensorView dy, TensorView w, TensorView dx, bool accumulate, StreamView stream) {
  checks::linear_backward_input(dy, w, dx);
  enqueue_(stream, "linear_backward_input", [this, dy, w, dx, accumulate, lent = workspace_] {
    fast::linear_backward_input(*parallel_, lent, dy, w, dx, accumulate);
  });
}

void HostOps::linear_backward_weight(TensorView dy, TensorView x, TensorView dw, TensorView dbias, StreamView stream) {
  checks::linear_backward_weight(dy, x, dw, dbias);
  enqueue_(stream, "linear_backward_weight", [this, dy, x, dw, dbias, lent = workspace_] {
    fast::linear_backward_weight(*parallel_, lent, dy, x, dw, dbias);
  });
}

// Products of eight-bit factors are those of the numbers that these stand for, so both kinds of sums are the same.

void HostOps::quantize(MeasuredView x, const Fp8Matrix& to, StreamView stream) {
  checks::quantize(x.values, to);
  enqueue_(stream, "quantize", [this, x, to] { fast::quantize(*parallel_, x, to); });
}

void HostOps::measure(MeasuredView x, StreamView stream) {
  checks::measure(x);
  enqueue_(stream, "measure", [this, x] { fast::measure(*parallel_, x); });
}

void HostOps::fp8_linear(const Fp8Matrix& x, const Fp8Matrix& w, Fp8Accumulation, TensorView bias, TensorView residual,
                         TensorView y, StreamView stream) {
  checks::fp8_linear(x, w, bias, residual, y);
  enqueue_(stream, "fp8_linear", [this, x, w, bias, residual, y, lent = workspace_] {
    fast::linear(*parallel_, lent, fast::fp8_values(x), fast::fp8_values(w), bias, y);
    if (residual) fast::add(*parallel_, residual, y, y);
  });
}

void HostOps::fp8_backward_input(const Fp8Matrix& dy, const Fp8Matrix& w, Fp8Accumulation, TensorView dx,
                                 bool accumulate, StreamView stream) {
  checks::fp8_backward_input(dy, w, dx);
  enqueue_(stream, "fp8_backward_input", [this, dy, w, dx, accumulate, lent = workspace_] {
    fast::linear_backward_input(*parallel_, lent, fast::fp8_values(dy), fast::fp8_values(w), dx, accumulate);
  });
}

void HostOps::fp8_backward_weight(const Fp8Matrix& dy, const Fp8Matrix& x, Fp8Accumulation, TensorView dw,
                                  StreamView stream) {
  checks::fp8_backward_weight(dy, x, dw);
  enqueue_(stream, "fp8_backward_weight", [this, dy, x, dw, lent = workspace_] {
    fast::linear_backward_weight(*parallel_, lent, fast::fp8_values(dy), fast::fp8_values(x), dw, {});
  });
}

void HostOps::head_loss(const HeadLoss& head, StreamView stream) {
  checks::head_loss(head);
  enqueue_(stream, "head_loss", [this, head, lent = workspace_] { fast::head_loss(*parallel_, lent, head); });
}

void HostOps::preference_loss(const PreferenceLoss& of, StreamView stream) {
  checks::preference_loss(of);
  enqueue_(stream, "preference_loss", [this, of] { fast::preference_loss(*parallel_, of); });
}

// -- experts -----------------------------------------------------------------------------------------------------

void HostOps::route(TensorView logits, bool normalized, const Routing& routing, StreamView stream) {
  checks::route(logits, routing);
  enqueue_(stream, "route",
           [this, logits, normalized, routing] { fast::route(*parallel_, logits, normalized, routing); });
}

void HostOps::route_backward(TensorView drouting_weights, TensorView logits, bool normalized, const Routing& routing,
                             TensorView dlogits, StreamView stream) {
  checks::route_backward(drouting_weights, logits, routing, dlogits);
  enqueue_(stream, "route_backward", [this, drouting_weights, logits, normalized, routing, dlogits] {
    fast::route_backward(*parallel_, drouting_weights, logits, normalized, routing, dlogits);
  });
}

void HostOps::expert_linear(RowValues x, TensorView w, const Routing& routing, TensorView y, StreamView stream) {
  checks::expert_linear(x, w, routing, y);
  enqueue_(stream, "expert_linear",
           [this, x, w, routing, y, lent = workspace_] { fast::expert_linear(*parallel_, lent, x, w, routing, y); });
}

void HostOps::expert_backward_input(RowValues dy, TensorView w, const Routing& routing, TensorView dx, bool accumulate,
                                    StreamView stream) {
  checks::expert_backward_input(dy, w, routing, dx);
  enqueue_(stream, "expert_backward_input", [this, dy, w, routing, dx, accumulate, lent = workspace_] {
    fast::expert_backward_input(*parallel_, lent, dy, w, routing, dx, accumulate);
  });
}

void HostOps::expert_backward_weight(RowValues dy, RowValues x, const Routing& routing, TensorView dw,
                                     StreamView stream) {
  checks::expert_backward_weight(dy, x, routing, dw);
  enqueue_(stream, "expert_backward_weight", [this, dy, x, routing, dw, lent = workspace_] {
    fast::expert_backward_weight(*parallel_, lent, dy, x, routing, dw);
  });
}

void HostOps::expert_swiglu(TensorView gate, TensorView up, const Routing& routing, TensorView y, StreamView stream) {
  checks::expert_swiglu(gate, up, routing, y);
  enqueue_(stream, "expert_swiglu",
           [this, gate, up, routing, y] { fast::expert_swiglu(*parallel_, gate, up, routing, y); });
}

void HostOps::expert_swiglu_backward(TensorView dy, TensorView gate, TensorView up, const Routing& routing,
                                     TensorView dgate, TensorView dup, TensorView drouting_weights, StreamView stream) {
  checks::expert_swiglu_backward(dy, gate, up, routing, dgate, dup, drouting_weights);
  enqueue_(stream, "expert_swiglu_backward", [this, dy, gate, up, routing, dgate, dup, drouting_weights] {
    fast::expert_swiglu_backward(*parallel_, dy, gate, up, routing, dgate, dup, drouting_weights);
  });
}

void HostOps::sum_rows(TensorView x, const Routing& routing, TensorView residual, TensorView y, StreamView stream) {
  checks::sum_rows(x, routing, residual, y);
  enqueue_(stream, "sum_rows",
           [this, x, routing, residual, y] { fast::sum_rows(*parallel_, x, routing, residual, y); });
}

// -- attention ---------------------------------------------------------------------------------------------------

void HostOps::attention(HeadsView q, HeadsView k, HeadsView v, TensorView out, TensorView lse,
                        const AttentionShape& shape, StreamView stream) {
  out = checks::batched(out, shape);
  checks::attention(q, k, v, out, lse, shape);
  enqueue_(stream, "attention", [this, q, k, v, out, lse, shape, lent = workspace_] {
    fast::attention(*parallel_, lent, q, k, v, out, lse, shape);
  });
}

void HostOps::attention_backward(TensorView dout, HeadsView q, HeadsView k, HeadsView v, TensorView out, TensorView lse,
                                 HeadsView dq, HeadsView dk, HeadsView dv, const AttentionShape& shape,
                                 StreamView stream) {
  out = checks::batched(out, shape);
  dout = checks::batched(dout, shape);
  checks::attention_backward(dout, q, k, v, out, lse, dq, dk, dv, shape);
  enqueue_(stream, "attention_backward", [this, dout, q, k, v, out, lse, dq, dk, dv, shape, lent = workspace_] {
    fast::attention_backward(*parallel_, lent, dout, q, k, v, out, lse, dq, dk, dv, shape);
  });
}

void HostOps::store_keys_values(HeadsView k, HeadsView v, const KeyValueCache& cache, const CachedTokens& tokens,
                                const AttentionShape& shape, StreamView stream) {
  checks::store_keys_values(k, v, cache, tokens, shape);
  enqueue_(stream, "store_keys_values",
           [k, v, cache, tokens, shape] { fast::store_keys_values(k, v, cache, tokens, shape); });
}

void HostOps::cached_attention(HeadsView q, const KeyValueCache& cache, const CachedTokens& tokens, TensorView out,
                               const AttentionShape& shape, StreamView stream) {
  checks::cached_attention(q, cache, tokens, out, shape);
  enqueue_(stream, "cached_attention", [this, q, cache, tokens, out, shape, lent = workspace_] {
    fast::cached_attention(*parallel_, lent, q, cache, tokens, out, shape);
  });
}

void HostOps::rope(TensorView x, TensorView table, RecordsView records, bool inverse, StreamView stream) {
  checks::rope(x, table, records);
  enqueue_(stream, "rope", [this, x, table, records, inverse] { fast::rope(*parallel_, x, table, inverse, records); });
}

// -- norms -------------------------------------------------------------------------------------------------------

void HostOps::layer_norm(TensorView x, TensorView weight, TensorView bias, MeasuredView y, TensorView mean,
                         TensorView rstd, float eps, StreamView stream) {
  checks::layer_norm(x, weight, bias, y.values, mean, rstd);
  enqueue_(stream, "layer_norm", [this, x, weight, bias, y, mean, rstd, eps] {
    fast::layer_norm(*parallel_, x, weight, bias, y, mean, rstd, eps);
  });
}

void HostOps::layer_norm_backward(TensorView dy, TensorView x, TensorView weight, TensorView mean, TensorView rstd,
                                  TensorView dx, bool accumulate, TensorView dweight, TensorView dbias,
                                  StreamView stream) {
  checks::layer_norm_backward(dy, x, weight, mean, rstd, dx, dweight, dbias);
  enqueue_(stream, "layer_norm_backward", [this, dy, x, weight, mean, rstd, dx, accumulate, dweight, dbias] {
    fast::layer_norm_backward(*parallel_, dy, x, weight, mean, rstd, dx, accumulate, dweight, dbias);
  });
}

void HostOps::rms_norm(TensorView x, NormWeight weight, MeasuredView y, TensorView rstd, float eps, StreamView stream) {
  checks::rms_norm(x, weight.values, y.values, rstd);
  enqueue_(stream, "rms_norm",
           [this, x, weight, y, rstd, eps] { fast::rms_norm(*parallel_, x, weight, y, rstd, eps); });
}

void HostOps::rms_norm_backward(TensorView dy, TensorView x, NormWeight weight, TensorView rstd, TensorView dx,
                                bool accumulate, TensorView dweight, StreamView stream) {
  checks::rms_norm_backward(dy, x, weight.values, rstd, dx, dweight);
  enqueue_(stream, "rms_norm_backward", [this, dy, x, weight, rstd, dx, accumulate, dweight] {
    fast::rms_norm_backward(*parallel_, dy, x, weight, rstd, dx, accumulate, dweight);
  });
}

// -- pointwise ---------------------------------------------------------------------------------------------------

void HostOps::gelu(TensorView x, MeasuredView y, StreamView stream) {
  checks::gelu(x, y.values);
  enqueue_(stream, "gelu", [this, x, y] { fast::gelu(*parallel_, x, y); });
}

void HostOps::gelu_backward(TensorView dy, TensorView x, MeasuredView dx, StreamView stream) {
  checks::gelu_backward(dy, x, dx.values);
  enqueue_(stream, "gelu_backward", [this, dy, x, dx] { fast::gelu_backward(*parallel_, dy, x, dx); });
}

void HostOps::swiglu(TensorView gate, TensorView up, MeasuredView y, StreamView stream) {
  checks::gated("swiglu", gate, up, y.values);
  enqueue_(stream, "swiglu", [this, gate, up, y] { fast::swiglu(*parallel_, gate, up, y); });
}

void HostOps::swiglu_backward(TensorView dy, TensorView gate, TensorView up, MeasuredView dgate, MeasuredView dup,
                              StreamView stream) {
  checks::gated_backward("swiglu_backward", dy, gate, up, dgate.values, dup.values);
  enqueue_(stream, "swiglu_backward",
           [this, dy, gate, up, dgate, dup] { fast::swiglu_backward(*parallel_, dy, gate, up, dgate, dup); });
}

void HostOps::geglu(TensorView gate, TensorView up, MeasuredView y, StreamView stream) {
  checks::gated("geglu", gate, up, y.values);
  enqueue_(stream, "geglu", [this, gate, up, y] { fast::geglu(*parallel_, gate, up, y); });
}

void HostOps::geglu_backward(TensorView dy, TensorView gate, TensorView up, MeasuredView dgate, MeasuredView dup,
                             StreamView stream) {
  checks::gated_backward("geglu_backward", dy, gate, up, dgate.values, dup.values);
  enqueue_(stream, "geglu_backward",
           [this, dy, gate, up, dgate, dup] { fast::geglu_backward(*parallel_, dy, gate, up, dgate, dup); });
}

void HostOps::add(TensorView a, TensorView b, TensorView y, StreamView stream) {
  checks::add(a, b, y);
  enqueue_(stream, "add", [this, a, b, y] { fast::add(*parallel_, a, b, y); });
}

void HostOps::add_scaled(TensorView x, float factor, TensorView residual, TensorView y, StreamView stream) {
  checks::add_scaled(x, residual, y);
  enqueue_(stream, "add_scaled",
           [this, x, factor, residual, y] { fast::add_scaled(*parallel_, x, factor, residual, y); });
}

void HostOps::dropout(TensorView x, const Dropout& of, TensorView y, bool accumulate, StreamView stream) {
  checks::dropout(x, of, y, accumulate);
  enqueue_(stream, "dropout", [this, x, of, y, accumulate] { fast::dropout(*parallel_, x, of, y, accumulate); });
}

void HostOps::decode(const CodedWeight& from, TensorView weight, StreamView stream) {
  checks::decode(from, weight);
  enqueue_(stream, "decode", [this, from, weight] { fast::decode(*parallel_, from, weight); });
}

// -- embedding ---------------------------------------------------------------------------------------------------

void HostOps::embedding(TensorView tokens, TensorView table, TensorView positions, const TokenRows& rows,
                        TensorView out, StreamView stream) {
  checks::embedding(tokens, table, positions, rows, out);
  enqueue_(stream, "embedding", [this, tokens, table, positions, rows, out] {
    fast::embedding(*parallel_, tokens, table, positions, rows, out);
  });
}

void HostOps::embedding_backward(TensorView dout, TensorView tokens, const TokenRows& rows, TensorView dtable,
                                 TensorView dpositions, TensorView token_rows, StreamView stream) {
  checks::embedding_backward(dout, tokens, rows, dtable, dpositions, token_rows);
  enqueue_(stream, "embedding_backward", [this, dout, tokens, rows, dtable, dpositions, token_rows] {
    fast::embedding_backward(*parallel_, dout, tokens, rows, dtable, dpositions, token_rows);
  });
}

// -- optimizer ---------------------------------------------------------------------------------------------------

void HostOps::adamw(const AdamPiece& piece, const AdamCoefficients& c, StreamView stream) {
  checks::adamw(piece);
  enqueue_(stream, "adamw", [this, piece, c] { kernels_.adamw(piece, c); });
}
void HostOps::weights_of_master(const float* master, bf16* weight, std::int64_t count, StreamView stream) {
  enqueue_(stream, "weights_of_master", [=, this] { kernels_.weights_of_master(master, weight, count); });
}
void HostOps::accumulate(float* sum, const bf16* gradient, bool first, std::int64_t count, StreamView stream) {
  enqueue_(stream, "accumulate", [=, this] { kernels_.accumulate(sum, gradient, first, count); });
}
void HostOps::accumulate(float* sum, const float* gradient, bool first, std::int64_t count, StreamView stream) {
  enqueue_(stream, "accumulate", [=, this] { kernels_.accumulate(sum, gradient, first, count); });
}
void HostOps::round(const float* sum, bf16* gradient, std::int64_t count, StreamView stream) {
  enqueue_(stream, "round", [=, this] { kernels_.round(sum, gradient, count); });
}
void HostOps::norm_blocks(const float* gradient, std::int64_t count, double* partial, StreamView stream) {
  enqueue_(stream, "norm_blocks", [=, this] { kernels_.norm_blocks(gradient, count, partial); });
}
void HostOps::norm_blocks(const bf16* gradient, std::int64_t count, double* partial, StreamView stream) {
  enqueue_(stream, "norm_blocks", [=, this] { kernels_.norm_blocks(gradient, count, partial); });
}

}  // namespace tandem
