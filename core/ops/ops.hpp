#pragma once
// Operations of a transformer on tensor views and a stream, implemented by each backend. All are
// asynchronous on `stream`; views must stay valid until the stream has passed the call. All tensors
// are dense and row-major. Throws MisuseError on shapes or dtypes that do not fit.
//
// Types: *activations* are f32 or bf16 (the compute type, the same for all operands of a call),
// *weights* bf16, *parameter gradients* f32, and added to, never overwritten; only the `dw` of linear_backward_weight
// and expert_backward_weight, the `dweight` of head_loss and the `dtable` of embedding_backward may be bf16 instead,
// and are then written whole. Sums are fp32. N stands for B * T tokens. An empty view (null data) leaves that operand
// or result out. Results are a function of the inputs, the shapes and the device alone: no unordered sums.
#include <concepts>
#include <cstddef>
#include <cstdint>

#include "core/device/device.hpp"
#include "core/numerics/weight_code.hpp"
#include "core/ops/update_kernels.hpp"
#include "core/tensor/tensor.hpp"

namespace tandem {

/// Largest shapes that a model will ask for: what scratch memory is booked from.
struct WorkspaceNeeds {
  std::int64_t tokens = 0;      ///< N
  std::int64_t sequence = 0;    ///< T, of every call
  std::int64_t vocabulary = 0;  ///< V
  std::int64_t channels = 0;    ///< widest input or output of a linear layer
  std::int64_t heads = 0;       ///< query heads
  std::int64_t kv_heads = 0;    ///< key/value heads; 0: as many
  std::int64_t head_dim = 0;
  DType activations = DType::f32;
  bool gradients = true;       ///< calls with gradients too, not forward alone
  std::int64_t head_rows = 0;  ///< rows_at_once of head_loss with a bf16 `dweight`; V: all
  bool token_rows = false;     ///< head_loss with a bf16 `dweight` has `token_rows`
  std::int64_t experts = 0;    ///< E; 0: no call for experts
  bool cached = false;         ///< cached_attention in place of attention
};

/// Records of packed rows, which neither see each other nor count each other's positions: of each token (b, t) the
/// first token of its record and one past the last, as positions in its row. (B, T) i32 on the device, both or neither;
/// none: each row is one record. Where only positions within records are asked for, `first` may be negative: a record
/// that begins before its row. Values are the caller's to keep right: nothing checks them.
struct RecordsView {
  const std::int32_t* first = nullptr;
  const std::int32_t* end = nullptr;
  constexpr explicit operator bool() const noexcept { return first != nullptr; }
};

/// Causal self-attention of query head h with key/value head h / (heads / kv_heads): token t sees the tokens of its
/// record after t - reach(), up to itself.
struct AttentionShape {
  std::int64_t batch = 0;     ///< B
  std::int64_t sequence = 0;  ///< T
  std::int64_t heads = 0;     ///< H
  std::int64_t kv_heads = 0;  ///< K, divides H
  std::int64_t head_dim = 0;  ///< D
  float scale = 1.0F;         ///< factor of q k^T
  std::int64_t window = 0;    ///< positions that a token sees, itself among them; 0: all before it
  RecordsView records{};      ///< records of all B rows

  /// Heads of queries that share one of keys.
  constexpr std::int64_t group() const noexcept { return heads / kv_heads; }
  /// Whether any token is hidden from a later one.
  constexpr bool windowed() const noexcept { return window > 0 && window < sequence; }
  /// `window`, with one value for all that hide nothing: bits, plans and choices depend on this alone.
  constexpr std::int64_t reach() const noexcept { return windowed() ? window : sequence; }
};

/// Rows that N tokens lie in one after another.
struct TokenRows {
  std::int64_t sequence = 1;  ///< T
  RecordsView records{};

  constexpr TokenRows(std::int64_t length, RecordsView of = {})
      : sequence(length), records(of) {}  // NOLINT(*-explicit-*)
  /// Position of token n within its record.
  constexpr std::int64_t position(std::int64_t n) const noexcept {
    return n % sequence - (records.first == nullptr ? 0 : records.first[n]);
  }
};

/// Keys and values of tokens that a model has seen, each a row of S positions for every sequence: (B, S, K D).
struct KeyValueCache {
  TensorView keys, values;
};

/// N tokens whose sequences have their earlier tokens in a cache. Values are the caller's to keep right: rows below B,
/// positions below S.
struct CachedTokens {
  const std::int32_t* rows = nullptr;  ///< (N) i32 on the device: the row of each token's sequence in the cache
  RecordsView records{};               ///< (1, N): n less the position of token n in its sequence is `first`

  constexpr std::int64_t position(std::int64_t n) const noexcept { return n - records.first[n]; }
};

/// Operands of attention: token (b, t) of head h starts at data + (b T + t) row_stride + h D elements,
/// so that q, k and v may be slices of one (B, T, 3C) buffer.
struct HeadsView {
  void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t row_stride = 0;
};

/// Linear layer into a softmax cross-entropy, in blocks of rows so that (N, V) logits never exist whole.
struct HeadLoss {
  TensorView x;                 ///< (N, C) activations
  TensorView weight;            ///< (V, C) bf16
  TensorView targets;           ///< (N) i32; negative: not a target
  TensorView losses;            ///< (N) f32, written: -log p(target), 0 where not a target
  float gradient_scale = 1.0F;  ///< gradients are of gradient_scale * sum(losses)
  TensorView dx;                ///< (N, C) activations, written; may be empty
  TensorView dweight;           ///< (V, C) f32, added to, or bf16, written whole; empty: weight is frozen
  /// Optional, (S) f32: x is S sequences of N / S rows, and the gradients of each one's losses are multiplied by its
  /// factor beside gradient_scale.
  TensorView sequence_factors{};
  /// Optional, for a bf16 `dweight` that the embedding's gradient is added to later: the rows of `dweight` which that
  /// changes, before rounding. Both views or neither.
  TensorView tokens{};      ///< (N) i32: row of `dweight` for each token
  TensorView token_rows{};  ///< (N, C) f32, written: row i of `dweight` row tokens[i]
  /// Rows of a bf16 `dweight` that are written at once, with the logits' gradients of all N tokens. 0, the default: all
  /// rows. Less than V: takes less memory, computes the logits twice, and excludes `token_rows`. The same bits on the
  /// host.
  std::int64_t rows_at_once = 0;
  bool gradients() const noexcept { return dx || dweight; }
  bool writes_weight() const noexcept { return dweight && dweight.dtype == DType::bf16; }
  /// Whether gradients of the logits are wanted when these are first made.
  bool gradients_at_first() const noexcept { return dx || (dweight && !in_slices()); }
  bool in_slices() const noexcept { return writes_weight() && rows_at_once > 0 && rows_at_once < weight.shape[0]; }
};

/// Direct preference optimization (Rafailov et al., arXiv 2305.18290, eq. 7) of S / 2 pairs: sequences 2 i, which was
/// chosen, and 2 i + 1, which was rejected. With r = beta (log p - log p of the reference) of a sequence, the loss of a
/// pair is -log sigmoid(r chosen - r rejected).
struct PreferenceLoss {
  TensorView losses;     ///< (S, T) f32, read: -log p of each target, 0 where not a target
  TensorView reference;  ///< (S) f32, read: log-probability of each sequence's targets under the reference
  float beta = 0.1F;
  TensorView sequence_factors;  ///< (S) f32, written: derivative of the pair's loss by the sum of a sequence's losses
  TensorView pairs;             ///< (S / 2, 3) f32, written: the loss, r of the chosen one, r of the rejected one
};

/// Elements of a tensor that are set to zero, each with probability `rate`; the others are divided by 1 - rate. Element
/// i is decided by number first + i of the stream of (seed, stream), on every processor alike.
struct Dropout {
  float rate = 0.0F;  ///< at least 0, below 1
  std::uint64_t seed = 0;
  std::uint64_t stream = 0;
  std::uint64_t first = 0;
};

/// A weight (O, I) or (E, O, I) as it is stored: codes, of four bits two in a byte, the first one in its upper half;
/// and scales, as scale_floats() has it.
struct CodedWeight {
  WeightCode code = WeightCode::none;
  const std::byte* codes = nullptr;
  const float* scales = nullptr;
};

/// The two kinds of eight-bit floating point: numerics::E4m3 and E5m2.
enum class Fp8Format : std::uint8_t { e4m3, e5m2 };

/// Sums that products make of a matrix (R, C): over its columns, its rows, or either.
enum class Fp8Sums : std::uint8_t { columns, rows, both };

/// How the products of eight-bit factors are added up: in fp32, or, `fast`, as tensor cores of Ada and Hopper do faster
/// and with fewer bits. On other devices both are the same.
enum class Fp8Accumulation : std::uint8_t { full, fast };

/// Sizes of linear layers' matrices whose products may be of eight-bit factors are multiples of this.
constexpr std::int64_t fp8_multiple = 16;

/// A matrix (R, C) of eight-bit floating point: codes times one power of two, which the largest magnitude of all
/// elements decides (numerics::fp8_exponent). How these lie in memory is the backend's matter.
struct Fp8Matrix {
  void* data = nullptr;  ///< OpsRules::fp8_bytes() of device memory, aligned to arena_alignment
  std::int64_t rows = 0, columns = 0;
  Fp8Sums sums = Fp8Sums::columns;
  Fp8Format format = Fp8Format::e4m3;
};

/// A tensor and, optionally, the largest magnitude of its elements, with which quantize() need not find it in a pass of
/// its own. An operation that writes the tensor writes this too, and so does measure(). It has no order: the same bits
/// whoever finds it.
struct MeasuredView {
  TensorView values;
  void* magnitude = nullptr;  ///< OpsRules::magnitude_bytes() of device memory, aligned to arena_alignment; null: none
  MeasuredView() = default;
  template <std::convertible_to<TensorView> View>
  MeasuredView(const View& view, void* largest = nullptr) : values(view), magnitude(largest) {}  // NOLINT(*-explicit-*)
};

/// Assignment of tokens to experts (Shazeer et al., arXiv 1701.06538). Each of N tokens chooses K of E experts:
/// slot n K + j is the j-th choice of token n. *Rows* are the slots sorted by expert, each expert's in their order.
struct Routing {
  TensorView experts;  ///< (N, K) i32: expert of each slot; those of a token differ
  TensorView weights;  ///< (N, K) f32: factor of the output of the slot's expert
  TensorView begins;   ///< (E + 1) i32: where the rows of each expert begin; the last is N K
  TensorView slots;    ///< (N K) i32: slot of each row
  TensorView rows;     ///< (N, K) i32: row of each slot
};

/// Values of rows, (N K, C), or of tokens, (N, C): each row then takes the values of its token.
struct RowValues {
  TensorView values;
  bool of_tokens = false;
};

/// Memory rules of a backend's ops: known without the device, so that runs elsewhere can be planned.
class OpsRules {
 public:
  virtual ~OpsRules() = default;
  /// Bytes of scratch that calls within `needs` use. Blocks on nothing.
  virtual std::size_t workspace_bytes(const WorkspaceNeeds& needs) const = 0;
  /// Whether gelu(up) has the bits of linear_gelu's act, whatever the shapes: it is the two operations.
  virtual bool repeats_gelu() const noexcept { return true; }
  /// Whether there are products in eight-bit floating point.
  virtual bool has_fp8() const noexcept { return true; }
  /// Bytes of an Fp8Matrix. Blocks on nothing.
  virtual std::size_t fp8_bytes(std::int64_t rows, std::int64_t columns, Fp8Sums sums) const = 0;
  /// Bytes of the magnitude of a MeasuredView. Blocks on nothing.
  virtual std::size_t magnitude_bytes() const = 0;
};

/// The weight (C) bf16 of an RMS norm, and what is added to it in fp32: 1 in Gemma's norms, whose weights begin at
/// zero.
struct NormWeight {
  TensorView values;
  float offset = 0.0F;
  NormWeight() = default;
  NormWeight(TensorView weight, float added = 0.0F) : values(weight), offset(added) {}  // NOLINT(*-explicit-*)
};

class Ops : public OpsRules {
 public:
  /// Lends device memory as scratch to all later calls; the caller keeps it until no call is queued.
  /// Calls that use it must be queued on one stream.
  virtual void bind_workspace(void* data, std::size_t bytes) = 0;

  // -- linear: x (N, I), w (O, I), bias (O) bf16 or empty, y (N, O) ------------------------------------
  /// y = x w^T + bias. `y` may be f32 while x is bf16.
  virtual void linear(TensorView x, TensorView w, TensorView bias, TensorView y, StreamView stream) = 0;
  /// y = x w^T + bias of few rows, bound by reading w: the bits of a row of y depend on its row of x alone, not on N.
  /// Others than those of linear().
  virtual void linear_rows(TensorView x, TensorView w, TensorView bias, TensorView y, StreamView stream) = 0;
  /// dx (N, I) = dy w, or += where `accumulate`. `dx` may be f32 while dy is bf16.
  virtual void linear_backward_input(TensorView dy, TensorView w, TensorView dx, bool accumulate,
                                     StreamView stream) = 0;
  /// dw (O, I) f32 += dy^T x, or bf16 = dy^T x, rounded once; dbias (O) f32 += column sums of dy. Each may be empty.
  virtual void linear_backward_weight(TensorView dy, TensorView x, TensorView dw, TensorView dbias,
                                      StreamView stream) = 0;
  /// y = residual + (x w^T + bias): the two operations, or one that rounds their sum once. `residual` (N, O) is of y's
  /// type and other memory than y.
  virtual void linear_add(TensorView x, TensorView w, TensorView bias, TensorView residual, TensorView y,
                          StreamView stream) {
    linear(x, w, bias, y, stream);
    add(residual, y, y, stream);
  }
  /// up = x w^T + bias and act = gelu(up): the two operations, or one that takes act from up before that is rounded.
  virtual void linear_gelu(TensorView x, TensorView w, TensorView bias, TensorView up, TensorView act,
                           StreamView stream) {
    linear(x, w, bias, up, stream);
    gelu(up, act, stream);
  }
  /// dup (N, I) = (dy w) gelu'(up), likewise.
  virtual void linear_gelu_backward_input(TensorView dy, TensorView w, TensorView up, TensorView dup,
                                          StreamView stream) {
    linear_backward_input(dy, w, dup, false, stream);
    gelu_backward(dup, up, dup, stream);
  }
  /// Loss of the output layer, with gradients where asked for.
  virtual void head_loss(const HeadLoss& head, StreamView stream) = 0;
  /// Loss of pairs of sequences, from the losses of their tokens, and its gradient. Sums in the order of tokens.
  virtual void preference_loss(const PreferenceLoss& of, StreamView stream) = 0;

  // -- linear, in eight-bit floating point: sizes are multiples of fp8_multiple; DeviceError without has_fp8() ------
  /// `to` = x (R, C) activations, rounded to nearest even, of finite elements the largest to the largest number of its
  /// format; where an element is not finite, all are NaN. With a magnitude, which has been written and is only read,
  /// x is read once; without, twice.
  virtual void quantize(MeasuredView x, const Fp8Matrix& to, StreamView stream) = 0;
  /// Writes the magnitude of x, activations of any shape: for tensors that are quantized again later.
  virtual void measure(MeasuredView x, StreamView stream) = 0;
  /// y (N, O) = residual + (x w^T + bias), as linear_add; `residual` may be empty. x (N, I) and w (O, I) are summed
  /// over their columns.
  virtual void fp8_linear(const Fp8Matrix& x, const Fp8Matrix& w, Fp8Accumulation sums, TensorView bias,
                          TensorView residual, TensorView y, StreamView stream) = 0;
  /// dx (N, I) = dy w, or += where `accumulate`. dy (N, O) is summed over its columns, w over its rows.
  virtual void fp8_backward_input(const Fp8Matrix& dy, const Fp8Matrix& w, Fp8Accumulation sums, TensorView dx,
                                  bool accumulate, StreamView stream) = 0;
  /// dw (O, I) f32 += dy^T x, or bf16 = dy^T x, rounded once. Both are summed over their rows.
  virtual void fp8_backward_weight(const Fp8Matrix& dy, const Fp8Matrix& x, Fp8Accumulation sums, TensorView dw,
                                   StreamView stream) = 0;

  // -- experts: w (E, O, I) bf16 ------------------------------------------------------------------------
  /// Writes `routing`: of each row of `logits` (N, E) f32 the K largest, the first ones of equal ones, NaN counting as
  /// the least, in falling order. Shares are the softmax of all logits at those, or `normalized`: of those alone.
  virtual void route(TensorView logits, bool normalized, const Routing& routing, StreamView stream) = 0;
  /// dlogits (N, E) activations, written, of drouting_weights (N, K) f32; `logits` and `routing` as route() had and
  /// wrote them.
  virtual void route_backward(TensorView drouting_weights, TensorView logits, bool normalized, const Routing& routing,
                              TensorView dlogits, StreamView stream) = 0;
  /// y (N K, O): of each row x w_e^T, e its expert.
  virtual void expert_linear(RowValues x, TensorView w, const Routing& routing, TensorView y, StreamView stream) = 0;
  /// dx (N K, I): of each row dy w_e, or += where `accumulate`.
  virtual void expert_backward_input(RowValues dy, TensorView w, const Routing& routing, TensorView dx, bool accumulate,
                                     StreamView stream) = 0;
  /// dw (E, O, I) f32 += dy^T x over the rows of each expert, or bf16 = those, rounded once, zeros where it has none.
  virtual void expert_backward_weight(RowValues dy, RowValues x, const Routing& routing, TensorView dw,
                                      StreamView stream) = 0;
  /// y (N K, F) = share silu(gate) up of each row.
  virtual void expert_swiglu(TensorView gate, TensorView up, const Routing& routing, TensorView y,
                             StreamView stream) = 0;
  /// dgate, dup written; each may be the memory of gate, up respectively. drouting_weights (N, K) f32 written.
  virtual void expert_swiglu_backward(TensorView dy, TensorView gate, TensorView up, const Routing& routing,
                                      TensorView dgate, TensorView dup, TensorView drouting_weights,
                                      StreamView stream) = 0;
  /// y (N, C) = residual + (the sum of x (N K, C) over the rows of each token, in the order of its slots), rounded
  /// once. `residual` may be empty, or y.
  virtual void sum_rows(TensorView x, const Routing& routing, TensorView residual, TensorView y, StreamView stream) = 0;

  // -- attention ---------------------------------------------------------------------------------------
  /// out (B, T, H D) dense; lse (B, H, T) f32: log of the softmax denominators, for backward.
  /// Never forms (T, T), and does work of T times the window or the records' length. `lse` may be empty.
  virtual void attention(HeadsView q, HeadsView k, HeadsView v, TensorView out, TensorView lse,
                         const AttentionShape& shape, StreamView stream) = 0;
  /// dq, dk, dv are written. `dout`, `out`: (B, T, H D).
  virtual void attention_backward(TensorView dout, HeadsView q, HeadsView k, HeadsView v, TensorView out,
                                  TensorView lse, HeadsView dq, HeadsView dk, HeadsView dv, const AttentionShape& shape,
                                  StreamView stream) = 0;
  /// Writes k and v of N tokens, (N, K D) each, to their places in `cache`.
  virtual void store_keys_values(HeadsView k, HeadsView v, const KeyValueCache& cache, const CachedTokens& tokens,
                                 const AttentionShape& shape, StreamView stream) = 0;
  /// out (N, H D): each of N tokens over the tokens of its sequence in `cache`, its own among them. `shape` is of one
  /// row of N tokens; its window is honoured, its records are not read. A token's bits depend on what it sees alone.
  virtual void cached_attention(HeadsView q, const KeyValueCache& cache, const CachedTokens& tokens, TensorView out,
                                const AttentionShape& shape, StreamView stream) = 0;
  /// Rotary embedding in place on the first R elements of each head of x (B, T, heads, D), halves convention (element i
  /// pairs with i + R/2). table (T, R/2, 2) f32: cosine and sine of each position and frequency, R at most D. Positions
  /// are those within `records`, with which the table has as many rows as they need. `inverse` rotates back, which is
  /// also the backward; where cosine and sine are longer than 1 it is the backward alone.
  virtual void rope(TensorView x, TensorView table, RecordsView records, bool inverse, StreamView stream) = 0;

  // -- norms over the last dimension: x (N, C), weight (C) bf16 ------------------------------------------
  // Results that are a MeasuredView are written with the magnitude, where that is there: here and below.
  /// y = (x - mean) * rstd * weight + bias. mean, rstd (N) f32, written, for backward.
  virtual void layer_norm(TensorView x, TensorView weight, TensorView bias, MeasuredView y, TensorView mean,
                          TensorView rstd, float eps, StreamView stream) = 0;
  /// dx = or += (where `accumulate`); dweight, dbias (C) f32 added to, each may be empty.
  virtual void layer_norm_backward(TensorView dy, TensorView x, TensorView weight, TensorView mean, TensorView rstd,
                                   TensorView dx, bool accumulate, TensorView dweight, TensorView dbias,
                                   StreamView stream) = 0;
  /// y = x * rstd * (weight + its offset), rstd = 1 / sqrt(mean(x^2) + eps) (N) f32, written.
  virtual void rms_norm(TensorView x, NormWeight weight, MeasuredView y, TensorView rstd, float eps,
                        StreamView stream) = 0;
  /// `dx` may be the same memory as `dy` where not `accumulate`.
  virtual void rms_norm_backward(TensorView dy, TensorView x, NormWeight weight, TensorView rstd, TensorView dx,
                                 bool accumulate, TensorView dweight, StreamView stream) = 0;

  // -- pointwise -----------------------------------------------------------------------------------------
  /// y = gelu(x), tanh form. Same shape.
  virtual void gelu(TensorView x, MeasuredView y, StreamView stream) = 0;
  /// dx = dy gelu'(x); dx may be dy.
  virtual void gelu_backward(TensorView dy, TensorView x, MeasuredView dx, StreamView stream) = 0;
  /// y = silu(gate) * up.
  virtual void swiglu(TensorView gate, TensorView up, MeasuredView y, StreamView stream) = 0;
  /// dgate, dup written; each may be the memory of gate, up respectively.
  virtual void swiglu_backward(TensorView dy, TensorView gate, TensorView up, MeasuredView dgate, MeasuredView dup,
                               StreamView stream) = 0;
  /// y = gelu(gate) * up, and its backward likewise.
  virtual void geglu(TensorView gate, TensorView up, MeasuredView y, StreamView stream) = 0;
  virtual void geglu_backward(TensorView dy, TensorView gate, TensorView up, MeasuredView dgate, MeasuredView dup,
                              StreamView stream) = 0;
  /// y = a + b; y may be a or b.
  virtual void add(TensorView a, TensorView b, TensorView y, StreamView stream) = 0;
  /// y = residual + factor x, rounded once, or factor x where `residual` is empty; y may be either.
  virtual void add_scaled(TensorView x, float factor, TensorView residual, TensorView y, StreamView stream) = 0;

  /// y (N, C) = x with elements dropped, or += where `accumulate`; y may be x where not. Its own backward.
  virtual void dropout(TensorView x, const Dropout& of, TensorView y, bool accumulate, StreamView stream) = 0;

  // -- weights in other formats -----------------------------------------------------------------------------
  /// weight (O, I) or (E, O, I) bf16 = the values of its codes, rounded once.
  virtual void decode(const CodedWeight& from, TensorView weight, StreamView stream) = 0;

  // -- embedding -----------------------------------------------------------------------------------------
  /// out (N, C) = table[token] (V, C) bf16 + positions[p] (P, C) bf16 or empty, p the position within its record of row
  /// t = n modulo `sequence`. tokens (N) i32; the caller has checked that they are below V.
  virtual void embedding(TensorView tokens, TensorView table, TensorView positions, const TokenRows& rows,
                         TensorView out, StreamView stream) = 0;
  /// dtable (V, C), dpositions (P, C) f32 added to in the order of rows; each may be empty. A bf16 dtable is written:
  /// for each token the sum of its rows in their order, rounded once; zeros where it has none. With the `token_rows`
  /// (N, C) f32 of head_loss, a token's sum begins with the row of them at its first row i, and dtable keeps its values
  /// for tokens that have no row.
  virtual void embedding_backward(TensorView dout, TensorView tokens, const TokenRows& rows, TensorView dtable,
                                  TensorView dpositions, TensorView token_rows, StreamView stream) = 0;

  // -- optimizer: as UpdateKernels, on device memory; the same bits -----------------------------------------
  virtual void adamw(const AdamPiece& piece, const AdamCoefficients& c, StreamView stream) = 0;
  virtual void weights_of_master(const float* master, bf16* weight, std::int64_t count, StreamView stream) = 0;
  virtual void accumulate(float* sum, const bf16* gradient, bool first, std::int64_t count, StreamView stream) = 0;
  virtual void accumulate(float* sum, const float* gradient, bool first, std::int64_t count, StreamView stream) = 0;
  virtual void round(const float* sum, bf16* gradient, std::int64_t count, StreamView stream) = 0;
  virtual void norm_blocks(const bf16* gradient, std::int64_t count, double* partial, StreamView stream) = 0;
  virtual void norm_blocks(const float* gradient, std::int64_t count, double* partial, StreamView stream) = 0;
};

}  // namespace tandem
