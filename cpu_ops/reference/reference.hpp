#pragma once
// Plain kernels for every operation of core/ops/ops.hpp: loops one can check by eye, sums in double, one
// thread, the caller's. Operands as described there; nothing is checked. They say what is right; the fast
// kernels are compared with them.
#include "core/ops/ops.hpp"

namespace tandem::reference {

void linear(TensorView x, TensorView w, TensorView bias, TensorView y);
void linear_backward_input(TensorView dy, TensorView w, TensorView dx, bool accumulate);
void linear_backward_weight(TensorView dy, TensorView x, TensorView dw, TensorView dbias);
/// y (R, C) bf16 = the numbers that x's elements are rounded to.
void quantize(TensorView x, Fp8Format format, TensorView y);
void head_loss(const HeadLoss& head);
void preference_loss(const PreferenceLoss& of);

void route(TensorView logits, bool normalized, const Routing& routing);
void route_backward(TensorView drouting_weights, TensorView logits, bool normalized, const Routing& routing,
                    TensorView dlogits);
void expert_linear(RowValues x, TensorView w, const Routing& routing, TensorView y);
void expert_backward_input(RowValues dy, TensorView w, const Routing& routing, TensorView dx, bool accumulate);
void expert_backward_weight(RowValues dy, RowValues x, const Routing& routing, TensorView dw);
void expert_swiglu(TensorView gate, TensorView up, const Routing& routing, TensorView y);
void expert_swiglu_backward(TensorView dy, TensorView gate, TensorView up, const Routing& routing, TensorView dgate,
                            TensorView dup, TensorView drouting_weights);
void sum_rows(TensorView x, const Routing& routing, TensorView residual, TensorView y);

void attention(HeadsView q, HeadsView k, HeadsView v, TensorView out, TensorView lse, const AttentionShape& shape);
void attention_backward(TensorView dout, HeadsView q, HeadsView k, HeadsView v, TensorView out, TensorView lse,
                        HeadsView dq, HeadsView dk, HeadsView dv, const AttentionShape& shape);
void cached_attention(HeadsView q, const KeyValueCache& cache, const CachedTokens& tokens, TensorView out,
                      const AttentionShape& shape);
void rope(TensorView x, TensorView table, bool inverse, RecordsView records = {});

void layer_norm(TensorView x, TensorView weight, TensorView bias, TensorView y, TensorView mean, TensorView rstd,
                float eps);
void layer_norm_backward(TensorView dy, TensorView x, TensorView weight, TensorView mean, TensorView rstd,
                         TensorView dx, bool accumulate, TensorView dweight, TensorView dbias);
void rms_norm(TensorView x, NormWeight weight, TensorView y, TensorView rstd, float eps);
void rms_norm_backward(TensorView dy, TensorView x, NormWeight weight, TensorView rstd, TensorView dx, bool accumulate,
                       TensorView dweight);

void gelu(TensorView x, TensorView y);
void gelu_backward(TensorView dy, TensorView x, TensorView dx);
void swiglu(TensorView gate, TensorView up, TensorView y);
void swiglu_backward(TensorView dy, TensorView gate, TensorView up, TensorView dgate, TensorView dup);
void geglu(TensorView gate, TensorView up, TensorView y);
void geglu_backward(TensorView dy, TensorView gate, TensorView up, TensorView dgate, TensorView dup);
void add(TensorView a, TensorView b, TensorView y);
void add_scaled(TensorView x, float factor, TensorView residual, TensorView y);
void dropout(TensorView x, const Dropout& of, TensorView y, bool accumulate);

void decode(const CodedWeight& from, TensorView weight);

void embedding(TensorView tokens, TensorView table, TensorView positions, const TokenRows& rows, TensorView out);
void embedding_backward(TensorView dout, TensorView tokens, const TokenRows& rows, TensorView dtable,
                        TensorView dpositions, TensorView token_rows = {});

void adamw(const AdamPiece& piece, const AdamCoefficients& c);
void weights_of_master(const float* master, bf16* weight, std::int64_t count);
/// T: bf16 or float.
template <class T>
void accumulate(float* sum, const T* gradient, bool first, std::int64_t count);
void round(const float* sum, bf16* gradient, std::int64_t count);
template <class T>
void norm_blocks(const T* gradient, std::int64_t count, double* partial);

}  // namespace tandem::reference
