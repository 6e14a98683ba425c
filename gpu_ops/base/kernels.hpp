#pragma once
// Launchers of the kernels in kernels/*.cu: one function each, typed and checked by the caller (cuda_ops.cpp). All are
// asynchronous on `stream`, operands as in core/ops/ops.hpp. Memory of any alignment is taken; 16-byte accesses are
// used where the operands are aligned to them. Sums have an order that depends on shapes alone. Throw DeviceError where
// the driver refuses a launch.
#include <cstddef>

#include "core/ops/ops.hpp"

struct CUstream_st;

namespace tandem::gpu {

// -- update.cu: the bits of core/numerics --------------------------------------------------------------------------
void adamw(const AdamPiece& piece, const AdamCoefficients& c, CUstream_st* stream);
void weights_of_master(const float* master, bf16* weight, std::int64_t count, CUstream_st* stream);
void accumulate(float* sum, const bf16* gradient, bool first, std::int64_t count, CUstream_st* stream);
void accumulate(float* sum, const float* gradient, bool first, std::int64_t count, CUstream_st* stream);
void round(const float* sum, bf16* gradient, std::int64_t count, CUstream_st* stream);
void norm_blocks(const bf16* gradient, std::int64_t count, double* partial, CUstream_st* stream);
void norm_blocks(const float* gradient, std::int64_t count, double* partial, CUstream_st* stream);

// -- pointwise.cu --------------------------------------------------------------------------------------------------
void gelu(TensorView x, MeasuredView y, CUstream_st* stream);
void gelu_backward(TensorView dy, TensorView x, MeasuredView dx, CUstream_st* stream);
void swiglu(TensorView gate, TensorView up, MeasuredView y, CUstream_st* stream);
void swiglu_backward(TensorView dy, TensorView gate, TensorView up, MeasuredView dgate, MeasuredView dup,
                     CUstream_st* stream);
void geglu(TensorView gate, TensorView up, MeasuredView y, CUstream_st* stream);
void geglu_backward(TensorView dy, TensorView gate, TensorView up, MeasuredView dgate, MeasuredView dup,
                    CUstream_st* stream);
void add(TensorView a, TensorView b, TensorView y, CUstream_st* stream);
void add_scaled(TensorView x, float factor, TensorView residual, TensorView y, CUstream_st* stream);
void rope(TensorView x, TensorView table, RecordsView records, bool inverse, CUstream_st* stream);

// -- dropout.cu ----------------------------------------------------------------------------------------------------
void dropout(TensorView x, const Dropout& of, TensorView y, bool accumulate, CUstream_st* stream);

// -- decode.cu: the bits of core/numerics --------------------------------------------------------------------------
void decode(const CodedWeight& from, TensorView weight, CUstream_st* stream);

// -- fp8.cu: the bits of core/numerics -----------------------------------------------------------------------------
/// Memory of the matrix is aligned to 16 bytes.
void quantize(MeasuredView x, const Fp8Matrix& to, CUstream_st* stream);
void measure(MeasuredView x, CUstream_st* stream);

// -- norms.cu ------------------------------------------------------------------------------------------------------
void layer_norm(TensorView x, TensorView weight, TensorView bias, MeasuredView y, TensorView mean, TensorView rstd,
                float eps, CUstream_st* stream);
void rms_norm(TensorView x, NormWeight weight, MeasuredView y, TensorView rstd, float eps, CUstream_st* stream);

// -- norms_backward.cu ---------------------------------------------------------------------------------------------
/// dx = or += (where `accumulate`); dweight, dbias (C) f32 +=, each may be empty. `mean` is empty for RMSNorm.
struct NormBackward {
  TensorView dy{}, x{};
  NormWeight weight{};
  TensorView mean{}, rstd{}, dx{}, dweight{}, dbias{};
  bool accumulate = false;
};
/// `scratch`: norm_backward_scratch().
void norm_backward(const NormBackward& norm, void* scratch, CUstream_st* stream);

// -- columns.cu ----------------------------------------------------------------------------------------------------
/// `scratch`: column_sums_scratch(). dbias (C) f32 += sums of the columns of dy (N, C).
void add_column_sums(TensorView dy, TensorView dbias, void* scratch, CUstream_st* stream);
/// dweight += sums of dy times the normalised x, dbias += sums of dy.
void add_norm_column_sums(const NormBackward& norm, void* scratch, CUstream_st* stream);
/// `parts` (count, channels) and where they are added up; nothing where `sum` is null.
struct PartSums {
  const float* parts;
  float* sum;
};
/// Every sum (channels) += its parts, in an order that depends on `count` alone.
void add_parts(const PartSums& a, const PartSums& b, std::int64_t count, std::int64_t channels, CUstream_st* stream);

// -- embedding.cu --------------------------------------------------------------------------------------------------
/// A token outside the vocabulary makes its row NaN.
void embedding(TensorView tokens, TensorView table, TensorView positions, const TokenRows& rows, TensorView out,
               CUstream_st* stream);
/// dtable (V, C) f32 += rows of dout, in their order: the bits of one addition after the other; or bf16 = their sums,
/// rounded once, each beginning with the token's first row of `token_rows` where there are any. A token outside the
/// vocabulary is left out.
void embedding_backward(TensorView dout, TensorView tokens, TensorView dtable, TensorView token_rows,
                        CUstream_st* stream);
/// dpositions (P, C) += rows of dout, in their order.
void position_backward(TensorView dout, const TokenRows& rows, TensorView dpositions, CUstream_st* stream);

// -- softmax.cu ----------------------------------------------------------------------------------------------------
/// Factors that turn a row's logits into their gradients.
struct RowScale {
  float largest;
  float factor;  ///< multiplies exp(logit - largest)
};
/// Rows of logits (n, V), `stride` elements apart, and what becomes of them.
struct LogitRows {
  const float* logits = nullptr;
  const std::int32_t* targets = nullptr;  ///< (n) as in HeadLoss; one that is not below V gives NaN
  float* losses = nullptr;                ///< (n), written
  /// Gradient of gradient_scale * losses, like the logits but f32 or bf16; may be the logits; null for none.
  void* gradient = nullptr;
  DType gradient_dtype = DType::f32;
  float gradient_scale = 1.0F;
  /// Null, or factors of gradient_scale: one for each `sequence` rows, the first of which is `first_row` here.
  const float* factors = nullptr;
  std::int64_t sequence = 1, first_row = 0;
  std::int64_t rows = 0, size = 0, stride = 0;
  RowScale* scales = nullptr;  ///< (n) written by softmax_loss(), or null; read by softmax_gradients()
  std::int64_t first = 0;      ///< softmax_gradients() alone: index in the vocabulary of the first of these logits
};
void softmax_loss(const LogitRows& rows, CUstream_st* stream);
/// Gradients of some columns of the logits, to the bits of softmax_loss().
void softmax_gradients(const LogitRows& rows, CUstream_st* stream);

// -- preference.cu -------------------------------------------------------------------------------------------------
void preference_loss(const PreferenceLoss& of, CUstream_st* stream);

/// Columns of a matrix: of each of n rows of `size` elements, the n elements that the ids name; zero for an id outside.
struct ColumnGather {
  const void* from = nullptr;  ///< (n, size), f32 or bf16 as `to` (n, n)
  void* to = nullptr;
  DType dtype = DType::f32;
  const std::int32_t* ids = nullptr;
  std::int64_t rows = 0, size = 0, from_stride = 0, to_stride = 0;
};
void gather_columns(const ColumnGather& gather, CUstream_st* stream);

// -- cached.cu -----------------------------------------------------------------------------------------------------
void linear_rows(TensorView x, TensorView w, TensorView bias, TensorView y, CUstream_st* stream);
void store_keys_values(const HeadsView& k, const HeadsView& v, const KeyValueCache& cache, const CachedTokens& tokens,
                       const AttentionShape& shape, CUstream_st* stream);
/// Heads of at most 256 dimensions, else MisuseError.
void cached_attention(const HeadsView& q, const KeyValueCache& cache, const CachedTokens& tokens, TensorView out,
                      const AttentionShape& shape, CUstream_st* stream);

// -- experts.cu ----------------------------------------------------------------------------------------------------
void route(TensorView logits, bool normalized, const Routing& routing, CUstream_st* stream);
void route_backward(TensorView drouting_weights, TensorView logits, bool normalized, const Routing& routing,
                    TensorView dlogits, CUstream_st* stream);
void expert_swiglu(TensorView gate, TensorView up, const Routing& routing, TensorView y, CUstream_st* stream);
void expert_swiglu_backward(TensorView dy, TensorView gate, TensorView up, const Routing& routing, TensorView dgate,
                            TensorView dup, TensorView drouting_weights, CUstream_st* stream);
void sum_rows(TensorView x, const Routing& routing, TensorView residual, TensorView y, CUstream_st* stream);

// -- expert_products.cu --------------------------------------------------------------------------------------------
void expert_linear(const RowValues& x, TensorView w, const Routing& routing, TensorView y, CUstream_st* stream);
void expert_backward_input(const RowValues& dy, TensorView w, const Routing& routing, TensorView dx, bool accumulate,
                           CUstream_st* stream);
void expert_backward_weight(const RowValues& dy, const RowValues& x, const Routing& routing, TensorView dw,
                            CUstream_st* stream);

}  // namespace tandem::gpu
