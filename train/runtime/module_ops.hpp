#pragma once
// Operations that pass each call on and tell a clock of which module it is. The model's blocks know nothing of it: the
// weight or gradient of a call says whose it is, else the operation, else the call before.
#include <unordered_map>

#include "core/ops/ops.hpp"
#include "core/params/parameter_access.hpp"
#include "models/config/config.hpp"
#include "train/runtime/module_clock.hpp"

namespace tandem {

/// Kind of the module that has a parameter.
ModuleKind kind_of_parameter(const Parameter& parameter) noexcept;

/// Operations for Transformer::compute_with, timed by module. One thread uses it.
class ModuleOps final : public Ops {
 public:
  /// All arguments must outlive the object.
  ModuleOps(Ops& inner, ModuleClock& clock, const ModelConfig& config)
      : inner_(inner), clock_(clock), head_layer_(static_cast<int>(config.layers) + 1), experts_(config.experts > 0) {}

  /// Takes the addresses of a block's weights, in place of those before, or of its gradients.
  void learn(const Layer& layer, int index, const WeightsGuard& weights);
  void learn(const Layer& layer, int index, const GradientsGuard& gradients);

  std::size_t workspace_bytes(const WorkspaceNeeds& needs) const override { return inner_.workspace_bytes(needs); }
  bool repeats_gelu() const noexcept override { return inner_.repeats_gelu(); }
  bool has_fp8() const noexcept override { return inner_.has_fp8(); }
  std::size_t fp8_bytes(std::int64_t rows, std::int64_t columns, Fp8Sums sums) const override {
    return inner_.fp8_bytes(rows, columns, sums);
  }
  std::size_t magnitude_bytes() const override { return inner_.magnitude_bytes(); }
  void bind_workspace(void* data, std::size_t bytes) override { inner_.bind_workspace(data, bytes); }

  void linear(TensorView x, TensorView w, TensorView bias, TensorView y, StreamView stream) override;
  void linear_rows(TensorView x, TensorView w, TensorView bias, TensorView y, StreamView stream) override;
  void linear_backward_input(TensorView dy, TensorView w, TensorView dx, bool accumulate, StreamView stream) override;
  void linear_backward_weight(TensorView dy, TensorView x, TensorView dw, TensorView dbias, StreamView stream) override;
  void linear_add(TensorView x, TensorView w, TensorView bias, TensorView residual, TensorView y,
                  StreamView stream) override;
  void linear_gelu(TensorView x, TensorView w, TensorView bias, TensorView up, TensorView act,
                   StreamView stream) override;
  void linear_gelu_backward_input(TensorView dy, TensorView w, TensorView up, TensorView dup,
                                  StreamView stream) override;
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

  void embedding(TensorView tokens, TensorView table, TensorView positions, const TokenRows& rows, TensorView out,
                 StreamView stream) override;
  void embedding_backward(TensorView dout, TensorView tokens, const TokenRows& rows, TensorView dtable,
                          TensorView dpositions, TensorView token_rows, StreamView stream) override;

  // Calls of the engine, which are of no module.
  void decode(const CodedWeight& from, TensorView weight, StreamView stream) override {
    inner_.decode(from, weight, stream);
  }
  void adamw(const AdamPiece& piece, const AdamCoefficients& c, StreamView stream) override {
    inner_.adamw(piece, c, stream);
  }
  void weights_of_master(const float* master, bf16* weight, std::int64_t count, StreamView stream) override {
    inner_.weights_of_master(master, weight, count, stream);
  }
  void accumulate(float* sum, const bf16* gradient, bool first, std::int64_t count, StreamView stream) override {
    inner_.accumulate(sum, gradient, first, count, stream);
  }
  void accumulate(float* sum, const float* gradient, bool first, std::int64_t count, StreamView stream) override {
    inner_.accumulate(sum, gradient, first, count, stream);
  }
  void round(const float* sum, bf16* gradient, std::int64_t count, StreamView stream) override {
    inner_.round(sum, gradient, count, stream);
  }
  void norm_blocks(const bf16* gradient, std::int64_t count, double* partial, StreamView stream) override {
    inner_.norm_blocks(gradient, count, partial, stream);
  }
  void norm_blocks(const float* gradient, std::int64_t count, double* partial, StreamView stream) override {
    inner_.norm_blocks(gradient, count, partial, stream);
  }

 private:
  using Kinds = std::unordered_map<const void*, ModuleKind>;

  void enter(ModuleKind kind, StreamView stream, double matmul_flops = 0.0, double attention_flops = 0.0);
  /// Kind of a linear layer, by its weight or gradient; that of the one before where it is unknown.
  ModuleKind of(const Kinds& kinds, const TensorView& view);
  /// Whether addresses are needed: elsewhere the operations say enough, and a guard may not cover a table that two
  /// layers share.
  bool is_block(int layer) const noexcept { return layer > 0 && layer < head_layer_; }
  ModuleKind mlp() const noexcept { return experts_ ? ModuleKind::experts : ModuleKind::mlp; }
  ModuleKind of_scaling(const TensorView& residual) const noexcept;

  Ops& inner_;
  ModuleClock& clock_;
  int head_layer_;
  bool experts_;
  int layer_ = 0;
  Kinds weights_, gradients_;
  ModuleKind last_ = ModuleKind::embedding;
  ModuleKind matrix_ = ModuleKind::embedding;  ///< the last linear layer's that is no adapter
};

/// Passes everything on to `inner`, tells the clock what the stream waits for there, and the ops where each layer's
/// weights and gradients lie. Guards that it hands out belong to `inner`.
class ModuleProbe final : public ParameterAccess {
 public:
  ModuleProbe(ParameterAccess& inner, const ParameterLayout& layout, ModuleOps& ops, ModuleClock& clock)
      : inner_(inner), layout_(layout), ops_(ops), clock_(clock) {}
  /// Begins the forward of one micro-batch, or of several at once.
  void begin_forward(StreamView stream);
  WeightsGuard fetch(int layer, StreamView stream) override;
  GradientsGuard gradients(int layer, StreamView stream) override;

 protected:
  void also_used(std::uint64_t, StreamView) override;
  void release(std::uint64_t, StreamView) noexcept override {}
  void commit(std::uint64_t, StreamView) override;
  void abandon(std::uint64_t) noexcept override {}

 private:
  ParameterAccess& inner_;
  const ParameterLayout& layout_;
  ModuleOps& ops_;
  ModuleClock& clock_;
};

}  // namespace tandem
