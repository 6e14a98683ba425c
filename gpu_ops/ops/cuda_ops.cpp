#include "gpu_ops/ops/cuda_ops.hpp"

#include <algorithm>
#include <utility>

#include "core/ops/op_checks.hpp"
#include "gpu_ops/base/attention.hpp"
#include "gpu_ops/base/fp8_matrix.hpp"
#include "gpu_ops/base/kernels.hpp"
#include "gpu_ops/base/matmul.hpp"
#include "gpu_ops/base/scratch.hpp"
#include "gpu_ops/device/native_stream.hpp"
#include "gpu_ops/device/runtime.hpp"
#include "gpu_ops/ops/head_loss.hpp"

namespace tandem {
namespace {

class CudaOps final : public Ops {
 public:
  CudaOps(std::unique_ptr<gpu::Matmul> matmul, std::unique_ptr<gpu::Attention> attention)
      : matmul_(std::move(matmul)), attention_(std::move(attention)) {}

  std::size_t workspace_bytes(const WorkspaceNeeds& needs) const override {
    const std::size_t attention =
        needs.heads == 0 ? 0 : attention_->scratch_bytes(gpu::largest_attention(needs), needs.activations);
    return gpu::ops_scratch(needs, matmul_->workspace_bytes(), attention);
  }
  void bind_workspace(void* data, std::size_t bytes) override {
    workspace_ = static_cast<std::byte*>(data);
    bytes_ = bytes;
  }

  void linear(TensorView x, TensorView w, TensorView bias, TensorView y, StreamView stream) override;
  void linear_rows(TensorView x, TensorView w, TensorView bias, TensorView y, StreamView stream) override;
  void linear_backward_input(TensorView dy, TensorView w, TensorView dx, bool accumulate, StreamView stream) override;
  void linear_backward_weight(TensorView dy, TensorView x, TensorView dw, TensorView dbias, StreamView stream) override;
  void linear_add(TensorView x, TensorView w, TensorView bias, TensorView residual, TensorView y,
                  StreamView stream) override;
  void linear_gelu(TensorView x, TensorView w, TensorView bias, TensorView up, TensorView act,
                   StreamView stream) override;
  bool repeats_gelu() const noexcept override { return !matmul_->fuses_any(); }
  void linear_gelu_backward_input(TensorView dy, TensorView w, TensorView up, TensorView dup,
                                  StreamView stream) override;
  bool has_fp8() const noexcept override { return matmul_->has_fp8(); }
  std::size_t fp8_bytes(std::int64_t rows, std::int64_t columns, Fp8Sums sums) const override {
    return gpu::fp8_bytes(rows, columns, sums);
  }
  std::size_t magnitude_bytes() const override { return sizeof(gpu::Largest); }
  void quantize(MeasuredView x, const Fp8Matrix& to, StreamView stream) override;
  void measure(MeasuredView x, StreamView stream) override;
  void fp8_linear(const Fp8Matrix& x, const Fp8Matrix& w, Fp8Accumulation sums, TensorView bias, TensorView residual,
                  TensorView y, StreamView stream) override;
  void fp8_backward_input(const Fp8Matrix& dy, const Fp8Matrix& w, Fp8Accumulation sums, TensorView dx, bool accumulate,
                          StreamView stream) override;
  void fp8_backward_weight(const Fp8Matrix& dy, const Fp8Matrix& x, Fp8Accumulation sums, TensorView dw,
                           StreamView stream) override;
  void head_loss(const HeadLoss& head, StreamView stream) override;
  void preference_loss(const PreferenceLoss& of, StreamView stream) override;

  void route(TensorView logits, bool normalized, const Routing& routing, StreamView stream) override;
  void route_backward(TensorView drouting_weights, TensorView logits, bool normalized, const Routing& routing,
                      TensorView dlogits, StreamView stream) override;
  void expert_linear(RowValues x, TensorView w, const Routing& routing, TensorView y, StreamView stream) override;
  void expert_backward_input(RowValues dy, TensorView w, const Routing& routing, TensorView dx, bool accumulate,
                             StreamView stream) override;
  void expert_backward_weight(RowValues dy, RowValues x, const Routing& routing, TensorView dw,
                              StreamView stream) override;
  void expert_swiglu(TensorView gate, TensorView up, const Routing& routing, TensorView y, StreamView stream) override;
  void expert_swiglu_backward(TensorView dy, TensorView gate, TensorView up, const Routing& routing, TensorView dgate,
                              TensorView dup, TensorView drouting_weights, StreamView stream) override;
  void sum_rows(TensorView x, const Routing& routing, TensorView residual, TensorView y, StreamView stream) override;

  void attention(HeadsView q, HeadsView k, HeadsView v, TensorView out, TensorView lse, const AttentionShape& shape,
                 StreamView stream) override;
  void attention_backward(TensorView dout, HeadsView q, HeadsView k, HeadsView v, TensorView out, TensorView lse,
                          HeadsView dq, HeadsView dk, HeadsView dv, const AttentionShape& shape,
                          StreamView stream) override;
  void store_keys_values(HeadsView k, HeadsView v, const KeyValueCache& cache, const CachedTokens& tokens,
                         const AttentionShape& shape, StreamView stream) override;
  void cached_attention(HeadsView q, const KeyValueCache& cache, const CachedTokens& tokens, TensorView out,
                        const AttentionShape& shape, StreamView stream) override;
  void rope(TensorView x, TensorView table, RecordsView records, bool inverse, StreamView stream) override;

  void layer_norm(TensorView x, TensorView weight, TensorView bias, MeasuredView y, TensorView mean, TensorView rstd,
                  float eps, StreamView stream) override;
  void layer_norm_backward(TensorView dy, TensorView x, TensorView weight, TensorView mean, TensorView rstd,
                           TensorView dx, bool accumulate, TensorView dweight, TensorView dbias,
                           StreamView stream) override;
  void rms_norm(TensorView x, NormWeight weight, MeasuredView y, TensorView rstd, float eps,
                StreamView stream) override;
  void rms_norm_backward(TensorView dy, TensorView x, NormWeight weight, TensorView rstd, TensorView dx,
                         bool accumulate, TensorView dweight, StreamView stream) override;

  void gelu(TensorView x, MeasuredView y, StreamView stream) override;
  void gelu_backward(TensorView dy, TensorView x, MeasuredView dx, StreamView stream) override;
  void swiglu(TensorView gate, TensorView up, MeasuredView y, StreamView stream) override;
  void swiglu_backward(TensorView dy, TensorView gate, TensorView up, MeasuredView dgate, MeasuredView dup,
                       StreamView stream) override;
  void geglu(TensorView gate, TensorView up, MeasuredView y, StreamView stream) override;
  void geglu_backward(TensorView dy, TensorView gate, TensorView up, MeasuredView dgate, MeasuredView dup,
                      StreamView stream) override;
  void add(TensorView a, TensorView b, TensorView y, StreamView stream) override;
  void add_scaled(TensorView x, float factor, TensorView residual, TensorView y, StreamView stream) override;
  void dropout(TensorView x, const Dropout& of, TensorView y, bool accumulate, StreamView stream) override;
  void decode(const CodedWeight& from, TensorView weight, StreamView stream) override;

  void embedding(TensorView tokens, TensorView table, TensorView positions, const TokenRows& rows, TensorView out,
                 StreamView stream) override;
  void embedding_backward(TensorView dout, TensorView tokens, const TokenRows& rows, TensorView dtable,
                          TensorView dpositions, TensorView token_rows, StreamView stream) override;

  void adamw(const AdamPiece& piece, const AdamCoefficients& c, StreamView stream) override;
  void weights_of_master(const float* master, bf16* weight, std::int64_t count, StreamView stream) override;
  void accumulate(float* sum, const bf16* gradient, bool first, std::int64_t count, StreamView stream) override;
  void accumulate(float* sum, const float* gradient, bool first, std::int64_t count, StreamView stream) override;
  void round(const float* sum, bf16* gradient, std::int64_t count, StreamView stream) override;
  void norm_blocks(const bf16* gradient, std::int64_t count, double* partial, StreamView stream) override;
  void norm_blocks(const float* gradient, std::int64_t count, double* partial, StreamView stream) override;

 private:
  /// The front of the workspace belongs to the matrix products, what follows to one kernel at a time.
  std::size_t matmul_bytes() const noexcept { return align_up(matmul_->workspace_bytes()); }
  /// Scratch of a kernel. Throws MisuseError where less than `bytes` was lent.
  void* scratch(std::size_t bytes) const {
    if (matmul_bytes() + bytes > bytes_) {
      throw MisuseError("device operation", "the workspace lent is smaller than the shapes need");
    }
    return workspace_ + matmul_bytes();
  }
  void* attention_scratch(const AttentionShape& shape, DType activations) const {
    return scratch(attention_->scratch_bytes(shape, activations));
  }
  template <class Product>
  void multiply(const Product& product, CUstream_st* stream) {
    scratch(0);
    matmul_->run(product, workspace_, stream);
  }

  std::unique_ptr<gpu::Matmul> matmul_;
  std::unique_ptr<gpu::Attention> attention_;
  std::byte* workspace_ = nullptr;
  std::size_t bytes_ = 0;
};

// -- linear ------------------------------------------------------------------------------------------------------

/// A dense matrix as a factor.
gpu::Factor factor(const TensorView& view, bool transposed) {
  return {view.data, view.dtype, view.shape[1], transposed};
}

gpu::Product forward(const TensorView& x, const TensorView& w, const TensorView& bias, const TensorView& y) {
  return {.m = x.shape[0],
          .n = y.shape[1],
          .k = x.shape[1],
          .a = factor(x, false),
          .b = factor(w, true),
          .bias = bias ? bias.as<bf16>() : nullptr,
          .c = y.data,
          .c_dtype = y.dtype,
          .c_stride = y.shape[1]};
}

gpu::Product backward_input(const TensorView& dy, const TensorView& w, const TensorView& dx) {
  return {.m = dx.shape[0],
          .n = dx.shape[1],
          .k = dy.shape[1],
          .a = factor(dy, false),
          .b = factor(w, false),
          .c = dx.data,
          .c_dtype = dx.dtype,
          .c_stride = dx.shape[1]};
}

void CudaOps::linear(TensorView x, TensorView w, TensorView bias, TensorView y, StreamView stream) {
  checks::linear(x, w, bias, y);
  multiply(forward(x, w, bias, y), native_stream(stream));
}

void CudaOps::linear_rows(TensorView x, TensorView w, TensorView bias, TensorView y, StreamView stream) {
  checks::linear_rows(x, w, bias, y);
  gpu::linear_rows(x, w, bias, y, native_stream(stream));
}

void CudaOps::linear_backward_input(TensorView dy, TensorView w, TensorView dx, bool accumulate, StreamView stream) {
  checks::linear_backward_input(dy, w, dx);
  gpu::Product product = backward_input(dy, w, dx);
  if (accumulate) product.addend = dx.data;
  multiply(product, native_stream(stream));
}

void CudaOps::linear_add(TensorView x, TensorView w, TensorView bias, TensorView residual, TensorView y,
                         StreamView stream) {
  checks::linear(x, w, bias, y);
  checks::add(residual, y, y);
  gpu::Product product = forward(x, w, bias, y);
  product.addend = residual.data;
  multiply(product, native_stream(stream));
}

void CudaOps::linear_gelu(TensorView x, TensorView w, TensorView bias, TensorView up, TensorView act,
                          StreamView stream) {
  checks::linear(x, w, bias, up);
  checks::gelu(up, act);
  gpu::Product product = forward(x, w, bias, act);
  product.epilogue = gpu::Epilogue::gelu;
  product.input = up.data;
  CUstream_st* const native = native_stream(stream);
  if (!matmul_->fuses(product)) return Ops::linear_gelu(x, w, bias, up, act, stream);
  multiply(product, native);
}

void CudaOps::linear_gelu_backward_input(TensorView dy, TensorView w, TensorView up, TensorView dup,
                                         StreamView stream) {
  checks::linear_backward_input(dy, w, dup);
  checks::gelu_backward(dup, up, dup);
  gpu::Product product = backward_input(dy, w, dup);
  product.epilogue = gpu::Epilogue::gelu_gradient;
  product.input = up.data;
  CUstream_st* const native = native_stream(stream);
  if (!matmul_->fuses(product)) return Ops::linear_gelu_backward_input(dy, w, up, dup, stream);
  multiply(product, native);
}

void CudaOps::linear_backward_weight(TensorView dy, TensorView x, TensorView dw, TensorView dbias, StreamView stream) {
  checks::linear_backward_weight(dy, x, dw, dbias);
  CUstream_st* const native = native_stream(stream);
  if (dw) {
    multiply(gpu::Product{.m = dw.shape[0],
                          .n = dw.shape[1],
                          .k = dy.shape[0],
                          .a = factor(dy, true),
                          .b = factor(x, false),
                          .addend = dw.dtype == DType::f32 ? dw.data : nullptr,
                          .c = dw.data,
                          .c_dtype = dw.dtype,
                          .c_stride = dw.shape[1]},
             native);
  }
  if (dbias) gpu::add_column_sums(dy, dbias, scratch(gpu::column_sums_scratch(dy.shape[1])), native);
}

// -- linear, in eight-bit floating point -------------------------------------------------------------------------

/// A matrix as a factor that is summed over its columns, or over its rows.
gpu::Fp8Factor over_columns(const Fp8Matrix& m) {
  const gpu::Fp8Parts parts = gpu::parts_of(m);
  return {parts.codes, parts.scale, m.format};
}
gpu::Fp8Factor over_rows(const Fp8Matrix& m) {
  const gpu::Fp8Parts parts = gpu::parts_of(m);
  return {parts.transposed, parts.scale, m.format};
}

void CudaOps::quantize(MeasuredView x, const Fp8Matrix& to, StreamView stream) {
  checks::quantize(x.values, to);
  gpu::quantize(x, to, native_stream(stream));
}

void CudaOps::measure(MeasuredView x, StreamView stream) {
  checks::measure(x);
  gpu::measure(x, native_stream(stream));
}

void CudaOps::fp8_linear(const Fp8Matrix& x, const Fp8Matrix& w, Fp8Accumulation sums, TensorView bias,
                         TensorView residual, TensorView y, StreamView stream) {
  checks::fp8_linear(x, w, bias, residual, y);
  multiply(gpu::Fp8Product{.m = x.rows,
                           .n = w.rows,
                           .k = x.columns,
                           .a = over_columns(x),
                           .b = over_columns(w),
                           .sums = sums,
                           .bias = bias ? bias.as<bf16>() : nullptr,
                           .addend = residual.data,
                           .c = y.data,
                           .c_dtype = y.dtype},
           native_stream(stream));
}

void CudaOps::fp8_backward_input(const Fp8Matrix& dy, const Fp8Matrix& w, Fp8Accumulation sums, TensorView dx,
                                 bool accumulate, StreamView stream) {
  checks::fp8_backward_input(dy, w, dx);
  multiply(gpu::Fp8Product{.m = dy.rows,
                           .n = w.columns,
                           .k = dy.columns,
                           .a = over_columns(dy),
                           .b = over_rows(w),
                           .sums = sums,
                           .addend = accumulate ? dx.data : nullptr,
                           .c = dx.data,
                           .c_dtype = dx.dtype},
           native_stream(stream));
}

void CudaOps::fp8_backward_weight(const Fp8Matrix& dy, const Fp8Matrix& x, Fp8Accumulation sums, TensorView dw,
                                  StreamView stream) {
  checks::fp8_backward_weight(dy, x, dw);
  multiply(gpu::Fp8Product{.m = dy.columns,
                           .n = x.columns,
                           .k = dy.rows,
                           .a = over_rows(dy),
                           .b = over_rows(x),
                           .sums = sums,
                           .addend = dw.dtype == DType::f32 ? dw.data : nullptr,
                           .c = dw.data,
                           .c_dtype = dw.dtype},
           native_stream(stream));
}

void CudaOps::head_loss(const HeadLoss& head, StreamView stream) {
  checks::head_loss(head);
  const gpu::HeadShape shape = gpu::shape_of(head);
  const gpu::HeadRows at_once = gpu::head_loss_rows(shape);
  const std::size_t bytes = gpu::head_loss_scratch(at_once, shape);
  gpu::head_loss(head, at_once, *matmul_, workspace_, scratch(bytes), native_stream(stream));
}

void CudaOps::preference_loss(const PreferenceLoss& of, StreamView stream) {
  checks::preference_loss(of);
  gpu::preference_loss(of, native_stream(stream));
}

// -- experts -----------------------------------------------------------------------------------------------------

void CudaOps::route(TensorView logits, bool normalized, const Routing& routing, StreamView stream) {
  checks::route(logits, routing);
  gpu::route(logits, normalized, routing, native_stream(stream));
}

void CudaOps::route_backward(TensorView drouting_weights, TensorView logits, bool normalized, const Routing& routing,
                             TensorView dlogits, StreamView stream) {
  checks::route_backward(drouting_weights, logits, routing, dlogits);
  gpu::route_backward(drouting_weights, logits, normalized, routing, dlogits, native_stream(stream));
}

void CudaOps::expert_linear(RowValues x, TensorView w, const Routing& routing, TensorView y, StreamView stream) {
  checks::expert_linear(x, w, routing, y);
  gpu::expert_linear(x, w, routing, y, native_stream(stream));
}

void CudaOps::expert_backward_input(RowValues dy, TensorView w, const Routing& routing, TensorView dx, bool accumulate,
                                    StreamView stream) {
  checks::expert_backward_input(dy, w, routing, dx);
  gpu::expert_backward_input(dy, w, routing, dx, accumulate, native_stream(stream));
}

void CudaOps::expert_backward_weight(RowValues dy, RowValues x, const Routing& routing, TensorView dw,
                                     StreamView stream) {
  checks::expert_backward_weight(dy, x, routing, dw);
  gpu::expert_backward_weight(dy, x, routing, dw, native_stream(stream));
}

void CudaOps::expert_swiglu(TensorView gate, TensorView up, const Routing& routing, TensorView y, StreamView stream) {
  checks::expert_swiglu(gate, up, routing, y);
  gpu::expert_swiglu(gate, up, routing, y, native_stream(stream));
}

void CudaOps::expert_swiglu_backward(TensorView dy, TensorView gate, TensorView up, const Routing& routing,
                                     TensorView dgate, TensorView dup, TensorView drouting_weights, StreamView stream) {
  checks::expert_swiglu_backward(dy, gate, up, routing, dgate, dup, drouting_weights);
  gpu::expert_swiglu_backward(dy, gate, up, routing, dgate, dup, drouting_weights, native_stream(stream));
}

void CudaOps::sum_rows(TensorView x, const Routing& routing, TensorView residual, TensorView y, StreamView stream) {
  checks::sum_rows(x, routing, residual, y);
  gpu::sum_rows(x, routing, residual, y, native_stream(stream));
}

// -- attention ---------------------------------------------------------------------------------------------------

void CudaOps::attention(HeadsView q, HeadsView k, HeadsView v, TensorView out, TensorView lse,
                        const AttentionShape& shape, StreamView stream) {
  out = checks::batched(out, shape);
  checks::attention(q, k, v, out, lse, shape);
  CUstream_st* const native = native_stream(stream);
  attention_->forward({q, k, v, out, lse, shape}, attention_scratch(shape, q.dtype), native);
}

void CudaOps::attention_backward(TensorView dout, HeadsView q, HeadsView k, HeadsView v, TensorView out, TensorView lse,
                                 HeadsView dq, HeadsView dk, HeadsView dv, const AttentionShape& shape,
                                 StreamView stream) {
  out = checks::batched(out, shape);
  dout = checks::batched(dout, shape);
  checks::attention_backward(dout, q, k, v, out, lse, dq, dk, dv, shape);
  CUstream_st* const native = native_stream(stream);
  attention_->backward({dout, q, k, v, out, lse, dq, dk, dv, shape}, attention_scratch(shape, q.dtype), native);
}

void CudaOps::store_keys_values(HeadsView k, HeadsView v, const KeyValueCache& cache, const CachedTokens& tokens,
                                const AttentionShape& shape, StreamView stream) {
  checks::store_keys_values(k, v, cache, tokens, shape);
  gpu::store_keys_values(k, v, cache, tokens, shape, native_stream(stream));
}

void CudaOps::cached_attention(HeadsView q, const KeyValueCache& cache, const CachedTokens& tokens, TensorView out,
                               const AttentionShape& shape, StreamView stream) {
  checks::cached_attention(q, cache, tokens, out, shape);
  gpu::cached_attention(q, cache, tokens, out, shape, native_stream(stream));
}

void CudaOps::rope(TensorView x, TensorView table, RecordsView records, bool inverse, StreamView stream) {
  checks::rope(x, table, records);
  gpu::rope(x, table, records, inverse, native_stream(stream));
}

// -- norms -------------------------------------------------------------------------------------------------------

void CudaOps::layer_norm(TensorView x, TensorView weight, TensorView bias, MeasuredView y, TensorView mean,
                         TensorView rstd, float eps, StreamView stream) {
  checks::layer_norm(x, weight, bias, y.values, mean, rstd);
  gpu::layer_norm(x, weight, bias, y, mean, rstd, eps, native_stream(stream));
}

void CudaOps::layer_norm_backward(TensorView dy, TensorView x, TensorView weight, TensorView mean, TensorView rstd,
                                  TensorView dx, bool accumulate, TensorView dweight, TensorView dbias,
                                  StreamView stream) {
  checks::layer_norm_backward(dy, x, weight, mean, rstd, dx, dweight, dbias);
  gpu::norm_backward({dy, x, weight, mean, rstd, dx, dweight, dbias, accumulate},
                     scratch(gpu::norm_backward_scratch(x.shape[1])), native_stream(stream));
}

void CudaOps::rms_norm(TensorView x, NormWeight weight, MeasuredView y, TensorView rstd, float eps, StreamView stream) {
  checks::rms_norm(x, weight.values, y.values, rstd);
  gpu::rms_norm(x, weight, y, rstd, eps, native_stream(stream));
}

void CudaOps::rms_norm_backward(TensorView dy, TensorView x, NormWeight weight, TensorView rstd, TensorView dx,
                                bool accumulate, TensorView dweight, StreamView stream) {
  checks::rms_norm_backward(dy, x, weight.values, rstd, dx, dweight);
  gpu::norm_backward({dy, x, weight, {}, rstd, dx, dweight, {}, accumulate},
                     scratch(gpu::norm_backward_scratch(x.shape[1])), native_stream(stream));
}

// -- pointwise ---------------------------------------------------------------------------------------------------

void CudaOps::gelu(TensorView x, MeasuredView y, StreamView stream) {
  checks::gelu(x, y.values);
  gpu::gelu(x, y, native_stream(stream));
}

void CudaOps::gelu_backward(TensorView dy, TensorView x, MeasuredView dx, StreamView stream) {
  checks::gelu_backward(dy, x, dx.values);
  gpu::gelu_backward(dy, x, dx, native_stream(stream));
}

void CudaOps::swiglu(TensorView gate, TensorView up, MeasuredView y, StreamView stream) {
  checks::gated("swiglu", gate, up, y.values);
  gpu::swiglu(gate, up, y, native_stream(stream));
}

void CudaOps::swiglu_backward(TensorView dy, TensorView gate, TensorView up, MeasuredView dgate, MeasuredView dup,
                              StreamView stream) {
  checks::gated_backward("swiglu_backward", dy, gate, up, dgate.values, dup.values);
  gpu::swiglu_backward(dy, gate, up, dgate, dup, native_stream(stream));
}

void CudaOps::geglu(TensorView gate, TensorView up, MeasuredView y, StreamView stream) {
  checks::gated("geglu", gate, up, y.values);
  gpu::geglu(gate, up, y, native_stream(stream));
}

void CudaOps::geglu_backward(TensorView dy, TensorView gate, TensorView up, MeasuredView dgate, MeasuredView dup,
                             StreamView stream) {
  checks::gated_backward("geglu_backward", dy, gate, up, dgate.values, dup.values);
  gpu::geglu_backward(dy, gate, up, dgate, dup, native_stream(stream));
}

void CudaOps::add(TensorView a, TensorView b, TensorView y, StreamView stream) {
  checks::add(a, b, y);
  gpu::add(a, b, y, native_stream(stream));
}

void CudaOps::add_scaled(TensorView x, float factor, TensorView residual, TensorView y, StreamView stream) {
  checks::add_scaled(x, residual, y);
  gpu::add_scaled(x, factor, residual, y, native_stream(stream));
}

void CudaOps::dropout(TensorView x, const Dropout& of, TensorView y, bool accumulate, StreamView stream) {
  checks::dropout(x, of, y, accumulate);
  gpu::dropout(x, of, y, accumulate, native_stream(stream));
}

void CudaOps::decode(const CodedWeight& from, TensorView weight, StreamView stream) {
  checks::decode(from, weight);
  gpu::decode(from, weight, native_stream(stream));
}

// -- embedding ---------------------------------------------------------------------------------------------------

void CudaOps::embedding(TensorView tokens, TensorView table, TensorView positions, const TokenRows& rows,
                        TensorView out, StreamView stream) {
  checks::embedding(tokens, table, positions, rows, out);
  gpu::embedding(tokens, table, positions, rows, out, native_stream(stream));
}

void CudaOps::embedding_backward(TensorView dout, TensorView tokens, const TokenRows& rows, TensorView dtable,
                                 TensorView dpositions, TensorView token_rows, StreamView stream) {
  checks::embedding_backward(dout, tokens, rows, dtable, dpositions, token_rows);
  CUstream_st* const native = native_stream(stream);
  if (dtable) gpu::embedding_backward(dout, tokens, dtable, token_rows, native);
  if (dpositions) gpu::position_backward(dout, rows, dpositions, native);
}

// -- optimizer ---------------------------------------------------------------------------------------------------

void CudaOps::adamw(const AdamPiece& piece, const AdamCoefficients& c, StreamView stream) {
  checks::adamw(piece);
  gpu::adamw(piece, c, native_stream(stream));
}
void CudaOps::weights_of_master(const float* master, bf16* weight, std::int64_t count, StreamView stream) {
  gpu::weights_of_master(master, weight, count, native_stream(stream));
}
void CudaOps::accumulate(float* sum, const bf16* gradient, bool first, std::int64_t count, StreamView stream) {
  gpu::accumulate(sum, gradient, first, count, native_stream(stream));
}
void CudaOps::accumulate(float* sum, const float* gradient, bool first, std::int64_t count, StreamView stream) {
  gpu::accumulate(sum, gradient, first, count, native_stream(stream));
}
void CudaOps::round(const float* sum, bf16* gradient, std::int64_t count, StreamView stream) {
  gpu::round(sum, gradient, count, native_stream(stream));
}
void CudaOps::norm_blocks(const bf16* gradient, std::int64_t count, double* partial, StreamView stream) {
  gpu::norm_blocks(gradient, count, partial, native_stream(stream));
}
void CudaOps::norm_blocks(const float* gradient, std::int64_t count, double* partial, StreamView stream) {
  gpu::norm_blocks(gradient, count, partial, native_stream(stream));
}

}  // namespace

std::unique_ptr<Ops> make_cuda_ops(Notice slower) {
  auto matmul = gpu::make_matmul(gpu::runtime::compute_capability(), slower);
  return std::make_unique<CudaOps>(std::move(matmul), gpu::make_attention(std::move(slower)));
}

std::string cuda_ops_key() { return gpu::matmul_key() + "; attention " + gpu::attention_key(); }

}  // namespace tandem
