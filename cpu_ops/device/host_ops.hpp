#pragma once
// The operations of the host device: checks shapes, then queues the fast kernels on a stream.
#include <functional>
#include <memory>
#include <string_view>

#include "core/host/parallel.hpp"
#include "core/ops/ops.hpp"
#include "cpu_ops/kernels/scratch.hpp"

namespace tandem {

/// Rules of HostOps that run on so many threads.
class HostRules final : public OpsRules {
 public:
  explicit HostRules(int threads) : threads_(threads) {}
  std::size_t workspace_bytes(const WorkspaceNeeds& needs) const override;
  std::size_t fp8_bytes(std::int64_t rows, std::int64_t columns, Fp8Sums sums) const override;
  std::size_t magnitude_bytes() const override;

 private:
  int threads_;
};

/// Every method checks the shapes and dtypes of its operands (MisuseError names the operation and the
/// shapes), queues its kernel, and returns. Kernels run on the threads of `parallel` with the scratch
/// memory that was bound, and allocate nothing themselves (oneDNN keeps packed tiles of its own). What a
/// kernel throws fails the stream.
class HostOps : public Ops {
 public:
  /// Queues `work` on a stream under the operation's name.
  using Enqueue = std::function<void(StreamView, std::string_view name, std::function<void()> work)>;

  /// `kernels` must outlive this object.
  HostOps(std::shared_ptr<Parallel> parallel, UpdateKernels& kernels, Enqueue enqueue);

  std::size_t workspace_bytes(const WorkspaceNeeds& needs) const override;
  std::size_t fp8_bytes(std::int64_t rows, std::int64_t columns, Fp8Sums sums) const override;
  std::size_t magnitude_bytes() const override;
  void bind_workspace(void* data, std::size_t bytes) override;

  void linear(TensorView x, TensorView w, TensorView bias, TensorView y, StreamView stream) override;
  void linear_rows(TensorView x, TensorView w, TensorView bias, TensorView y, StreamView stream) override;
  void linear_backward_input(TensorView dy, TensorView w, TensorView dx, bool accumulate, StreamView stream) override;
  void linear_backward_weight(TensorView dy, TensorView x, TensorView dw, TensorView dbias, StreamView stream) override;
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
  std::shared_ptr<Parallel> parallel_;
  UpdateKernels& kernels_;
  Enqueue enqueue_;
  fast::Workspace workspace_;
};

}  // namespace tandem
