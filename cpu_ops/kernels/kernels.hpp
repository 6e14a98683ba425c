#pragma once
// The fast kernels of the operations in core/ops/ops.hpp: synchronous, parallel inside, fp32 arithmetic on
// f32 or bf16 activations. Operands are as described there and already checked. Results do not depend on
// the number of threads. `*_scratch` says how many bytes of workspace one call takes at most; it grows
// with each of its arguments. Kernels without a Workspace need none.
#include <cstddef>
#include <cstdint>

#include "core/ops/ops.hpp"
#include "cpu_ops/kernels/scratch.hpp"

namespace tandem::fast {

std::size_t linear_scratch(std::int64_t rows, std::int64_t in, std::int64_t out, DType activations, int threads);
void linear(Parallel& parallel, const Workspace& workspace, TensorView x, TensorView w, TensorView bias, TensorView y);
/// Products by vectors: each row's sums run in 32 lanes over its inputs, whatever the number of rows.
void linear_rows(Parallel& parallel, TensorView x, TensorView w, TensorView bias, TensorView y);
void linear_backward_input(Parallel& parallel, const Workspace& workspace, TensorView dy, TensorView w, TensorView dx,
                           bool accumulate);
void linear_backward_weight(Parallel& parallel, const Workspace& workspace, TensorView dy, TensorView x, TensorView dw,
                            TensorView dbias);

/// Bytes of an Fp8Matrix: its elements as the numbers that they stand for, in bf16.
std::size_t fp8_bytes(std::int64_t rows, std::int64_t columns);
/// Bytes of the magnitude of a MeasuredView: one integer.
constexpr std::size_t magnitude_bytes = sizeof(std::uint32_t);
/// View of the numbers of an eight-bit matrix in bf16, (R, C).
TensorView fp8_values(const Fp8Matrix& m);
void quantize(Parallel& parallel, MeasuredView x, const Fp8Matrix& to);
void measure(Parallel& parallel, MeasuredView x);

void route(Parallel& parallel, TensorView logits, bool normalized, const Routing& routing);
void route_backward(Parallel& parallel, TensorView drouting_weights, TensorView logits, bool normalized,
                    const Routing& routing, TensorView dlogits);
/// Bytes of scratch for the products of experts over `tokens` tokens.
std::size_t expert_scratch(std::int64_t tokens, std::int64_t in, std::int64_t out, int threads);
void expert_linear(Parallel& parallel, const Workspace& workspace, RowValues x, TensorView w, const Routing& routing,
                   TensorView y);
void expert_backward_input(Parallel& parallel, const Workspace& workspace, RowValues dy, TensorView w,
                           const Routing& routing, TensorView dx, bool accumulate);
void expert_backward_weight(Parallel& parallel, const Workspace& workspace, RowValues dy, RowValues x,
                            const Routing& routing, TensorView dw);
void expert_swiglu(Parallel& parallel, TensorView gate, TensorView up, const Routing& routing, TensorView y);
void expert_swiglu_backward(Parallel& parallel, TensorView dy, TensorView gate, TensorView up, const Routing& routing,
                            TensorView dgate, TensorView dup, TensorView drouting_weights);
void sum_rows(Parallel& parallel, TensorView x, const Routing& routing, TensorView residual, TensorView y);

/// Rows of logits that are made at once: a function of N and V alone.
std::int64_t head_loss_rows(std::int64_t tokens, std::int64_t vocabulary);
/// `written`: rows of a bf16 `dweight` that are written at once, for which the gradients of so many of all logits
/// exist; 0: dweight is f32. `token_rows`: with these.
std::size_t head_loss_scratch(std::int64_t tokens, std::int64_t channels, std::int64_t vocabulary, DType activations,
                              int threads, std::int64_t written = 0, bool token_rows = false);
/// Throws MisuseError for a target, or one of the `tokens`, that is not below V.
void head_loss(Parallel& parallel, const Workspace& workspace, const HeadLoss& head);
void preference_loss(Parallel& parallel, const PreferenceLoss& of);

std::size_t attention_scratch(std::int64_t sequence, std::int64_t head_dim, int threads);
void attention(Parallel& parallel, const Workspace& workspace, HeadsView q, HeadsView k, HeadsView v, TensorView out,
               TensorView lse, const AttentionShape& shape);
std::size_t attention_backward_scratch(std::int64_t sequence, std::int64_t head_dim, int threads);
void attention_backward(Parallel& parallel, const Workspace& workspace, TensorView dout, HeadsView q, HeadsView k,
                        HeadsView v, TensorView out, TensorView lse, HeadsView dq, HeadsView dk, HeadsView dv,
                        const AttentionShape& shape);
/// Scores that attention makes for one head of all rows: those that tokens see, and the others of the blocks that these
/// are in.
std::int64_t attention_scores(const AttentionShape& shape);
void store_keys_values(HeadsView k, HeadsView v, const KeyValueCache& cache, const CachedTokens& tokens,
                       const AttentionShape& shape);
std::size_t cached_attention_scratch(std::int64_t head_dim, int threads);
void cached_attention(Parallel& parallel, const Workspace& workspace, HeadsView q, const KeyValueCache& cache,
                      const CachedTokens& tokens, TensorView out, const AttentionShape& shape);
void rope(Parallel& parallel, TensorView x, TensorView table, bool inverse, RecordsView records = {});

void layer_norm(Parallel& parallel, TensorView x, TensorView weight, TensorView bias, MeasuredView y, TensorView mean,
                TensorView rstd, float eps);
void layer_norm_backward(Parallel& parallel, TensorView dy, TensorView x, TensorView weight, TensorView mean,
                         TensorView rstd, TensorView dx, bool accumulate, TensorView dweight, TensorView dbias);
void rms_norm(Parallel& parallel, TensorView x, NormWeight weight, MeasuredView y, TensorView rstd, float eps);
void rms_norm_backward(Parallel& parallel, TensorView dy, TensorView x, NormWeight weight, TensorView rstd,
                       TensorView dx, bool accumulate, TensorView dweight);

void gelu(Parallel& parallel, TensorView x, MeasuredView y);
void gelu_backward(Parallel& parallel, TensorView dy, TensorView x, MeasuredView dx);
void swiglu(Parallel& parallel, TensorView gate, TensorView up, MeasuredView y);
void swiglu_backward(Parallel& parallel, TensorView dy, TensorView gate, TensorView up, MeasuredView dgate,
                     MeasuredView dup);
void geglu(Parallel& parallel, TensorView gate, TensorView up, MeasuredView y);
void geglu_backward(Parallel& parallel, TensorView dy, TensorView gate, TensorView up, MeasuredView dgate,
                    MeasuredView dup);
void add(Parallel& parallel, TensorView a, TensorView b, TensorView y);
void add_scaled(Parallel& parallel, TensorView x, float factor, TensorView residual, TensorView y);
void dropout(Parallel& parallel, TensorView x, const Dropout& of, TensorView y, bool accumulate);

void decode(Parallel& parallel, const CodedWeight& from, TensorView weight);

/// Throws MisuseError for a token that is negative or not below V, before anything is written.
void embedding(Parallel& parallel, TensorView tokens, TensorView table, TensorView positions, const TokenRows& rows,
               TensorView out);
void embedding_backward(Parallel& parallel, TensorView dout, TensorView tokens, const TokenRows& rows,
                        TensorView dtable, TensorView dpositions, TensorView token_rows = {});

}  // namespace tandem::fast
