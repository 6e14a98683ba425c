#pragma once
// Checks of the operands of core/ops/ops.hpp, the same for every backend: each is called before its operation is queued
// and throws MisuseError "OPERATION: why" with the shapes that do not fit.
#include "core/ops/ops.hpp"
#include "core/ops/undo_record.hpp"

namespace tandem::checks {

void linear(const TensorView& x, const TensorView& w, const TensorView& bias, const TensorView& y);
void linear_rows(const TensorView& x, const TensorView& w, const TensorView& bias, const TensorView& y);
void linear_backward_input(const TensorView& dy, const TensorView& w, const TensorView& dx);
void linear_backward_weight(const TensorView& dy, const TensorView& x, const TensorView& dw, const TensorView& dbias);
void quantize(const TensorView& x, const Fp8Matrix& to);
void measure(const MeasuredView& x);
void fp8_linear(const Fp8Matrix& x, const Fp8Matrix& w, const TensorView& bias, const TensorView& residual,
                const TensorView& y);
void fp8_backward_input(const Fp8Matrix& dy, const Fp8Matrix& w, const TensorView& dx);
void fp8_backward_weight(const Fp8Matrix& dy, const Fp8Matrix& x, const TensorView& dw);
void head_loss(const HeadLoss& head);
void preference_loss(const PreferenceLoss& of);

void route(const TensorView& logits, const Routing& routing);
void route_backward(const TensorView& drouting_weights, const TensorView& logits, const Routing& routing,
                    const TensorView& dlogits);
void expert_linear(const RowValues& x, const TensorView& w, const Routing& routing, const TensorView& y);
void expert_backward_input(const RowValues& dy, const TensorView& w, const Routing& routing, const TensorView& dx);
void expert_backward_weight(const RowValues& dy, const RowValues& x, const Routing& routing, const TensorView& dw);
void expert_swiglu(const TensorView& gate, const TensorView& up, const Routing& routing, const TensorView& y);
void expert_swiglu_backward(const TensorView& dy, const TensorView& gate, const TensorView& up, const Routing& routing,
                            const TensorView& dgate, const TensorView& dup, const TensorView& drouting_weights);
void sum_rows(const TensorView& x, const Routing& routing, const TensorView& residual, const TensorView& y);

/// The view as (B, T, H D), whether it was passed so or as (B T, H D).
TensorView batched(const TensorView& view, const AttentionShape& shape);
/// `out` (and `dout`) as `batched` returns them.
void attention(const HeadsView& q, const HeadsView& k, const HeadsView& v, const TensorView& out, const TensorView& lse,
               const AttentionShape& shape);
void attention_backward(const TensorView& dout, const HeadsView& q, const HeadsView& k, const HeadsView& v,
                        const TensorView& out, const TensorView& lse, const HeadsView& dq, const HeadsView& dk,
                        const HeadsView& dv, const AttentionShape& shape);
void store_keys_values(const HeadsView& k, const HeadsView& v, const KeyValueCache& cache, const CachedTokens& tokens,
                       const AttentionShape& shape);
void cached_attention(const HeadsView& q, const KeyValueCache& cache, const CachedTokens& tokens, const TensorView& out,
                      const AttentionShape& shape);
void rope(const TensorView& x, const TensorView& table, const RecordsView& of);

void layer_norm(const TensorView& x, const TensorView& weight, const TensorView& bias, const TensorView& y,
                const TensorView& mean, const TensorView& rstd);
void layer_norm_backward(const TensorView& dy, const TensorView& x, const TensorView& weight, const TensorView& mean,
                         const TensorView& rstd, const TensorView& dx, const TensorView& dweight,
                         const TensorView& dbias);
void rms_norm(const TensorView& x, const TensorView& weight, const TensorView& y, const TensorView& rstd);
void rms_norm_backward(const TensorView& dy, const TensorView& x, const TensorView& weight, const TensorView& rstd,
                       const TensorView& dx, const TensorView& dweight);

void gelu(const TensorView& x, const TensorView& y);
void gelu_backward(const TensorView& dy, const TensorView& x, const TensorView& dx);
/// Checks of activations with a gate; `name` is the activation's, for messages.
void gated(std::string_view name, const TensorView& gate, const TensorView& up, const TensorView& y);
void gated_backward(std::string_view name, const TensorView& dy, const TensorView& gate, const TensorView& up,
                    const TensorView& dgate, const TensorView& dup);
void add(const TensorView& a, const TensorView& b, const TensorView& y);
void add_scaled(const TensorView& x, const TensorView& residual, const TensorView& y);
void dropout(const TensorView& x, const Dropout& of, const TensorView& y, bool accumulate);
void decode(const CodedWeight& from, const TensorView& weight);

void embedding(const TensorView& tokens, const TensorView& table, const TensorView& positions, const TokenRows& rows,
               const TensorView& out);
void embedding_backward(const TensorView& dout, const TensorView& tokens, const TokenRows& rows,
                        const TensorView& dtable, const TensorView& dpositions, const TensorView& token_rows);

/// Check of adamw, for UpdateKernels too.
void adamw(const AdamPiece& piece);
/// Check of updates that may be taken back.
void speculation(const AdamPiece& piece, const AdamCoefficients& c, const UndoPiece& undo);

}  // namespace tandem::checks
