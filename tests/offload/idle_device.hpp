#pragma once
// A device that does nothing, at once: what is left of a step's time and allocations is the engine's own.
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <string_view>

#include "core/base/error.hpp"
#include "core/device/device.hpp"
#include "core/ops/ops.hpp"
#include "core/ops/update_kernels.hpp"

namespace tandem::testing {

class IdleOps : public Ops {
 public:
  std::size_t workspace_bytes(const WorkspaceNeeds&) const override { return 0; }
  void bind_workspace(void*, std::size_t) override {}
  void linear(TensorView, TensorView, TensorView, TensorView, StreamView) override {}
  void linear_rows(TensorView, TensorView, TensorView, TensorView, StreamView) override {}
  void linear_backward_input(TensorView, TensorView, TensorView, bool, StreamView) override {}
  void linear_backward_weight(TensorView, TensorView, TensorView, TensorView, StreamView) override {}
  std::size_t fp8_bytes(std::int64_t, std::int64_t, Fp8Sums) const override { return 0; }
  std::size_t magnitude_bytes() const override { return 0; }
  void quantize(MeasuredView, const Fp8Matrix&, StreamView) override {}
  void measure(MeasuredView, StreamView) override {}
  void fp8_linear(const Fp8Matrix&, const Fp8Matrix&, Fp8Accumulation, TensorView, TensorView, TensorView,
                  StreamView) override {}
  void fp8_backward_input(const Fp8Matrix&, const Fp8Matrix&, Fp8Accumulation, TensorView, bool, StreamView) override {}
  void fp8_backward_weight(const Fp8Matrix&, const Fp8Matrix&, Fp8Accumulation, TensorView, StreamView) override {}
  void head_loss(const HeadLoss&, StreamView) override {}
  void route(TensorView, bool, const Routing&, StreamView) override {}
  void route_backward(TensorView, TensorView, bool, const Routing&, TensorView, StreamView) override {}
  void expert_linear(RowValues, TensorView, const Routing&, TensorView, StreamView) override {}
  void expert_backward_input(RowValues, TensorView, const Routing&, TensorView, bool, StreamView) override {}
  void expert_backward_weight(RowValues, RowValues, const Routing&, TensorView, StreamView) override {}
  void expert_swiglu(TensorView, TensorView, const Routing&, TensorView, StreamView) override {}
  void expert_swiglu_backward(TensorView, TensorView, TensorView, const Routing&, TensorView, TensorView, TensorView,
                              StreamView) override {}
  void sum_rows(TensorView, const Routing&, TensorView, TensorView, StreamView) override {}
  void attention(HeadsView, HeadsView, HeadsView, TensorView, TensorView, const AttentionShape&, StreamView) override {}
  void attention_backward(TensorView, HeadsView, HeadsView, HeadsView, TensorView, TensorView, HeadsView, HeadsView,
                          HeadsView, const AttentionShape&, StreamView) override {}
  void store_keys_values(HeadsView, HeadsView, const KeyValueCache&, const CachedTokens&, const AttentionShape&,
                         StreamView) override {}
  void cached_attention(HeadsView, const KeyValueCache&, const CachedTokens&, TensorView, const AttentionShape&,
                        StreamView) override {}
  void rope(TensorView, TensorView, RecordsView, bool, StreamView) override {}
  void layer_norm(TensorView, TensorView, TensorView, MeasuredView, TensorView, TensorView, float,
                  StreamView) override {}
  void layer_norm_backward(TensorView, TensorView, TensorView, TensorView, TensorView, TensorView, bool, TensorView,
                           TensorView, StreamView) override {}
  void rms_norm(TensorView, NormWeight, MeasuredView, TensorView, float, StreamView) override {}
  void rms_norm_backward(TensorView, TensorView, NormWeight, TensorView, TensorView, bool, TensorView,
                         StreamView) override {}
  void gelu(TensorView, MeasuredView, StreamView) override {}
  void gelu_backward(TensorView, TensorView, MeasuredView, StreamView) override {}
  void swiglu(TensorView, TensorView, MeasuredView, StreamView) override {}
  void swiglu_backward(TensorView, TensorView, TensorView, MeasuredView, MeasuredView, StreamView) override {}
  void geglu(TensorView, TensorView, MeasuredView, StreamView) override {}
  void geglu_backward(TensorView, TensorView, TensorView, MeasuredView, MeasuredView, StreamView) override {}
  void add(TensorView, TensorView, TensorView, StreamView) override {}
  void add_scaled(TensorView, float, TensorView, TensorView, StreamView) override {}
  void preference_loss(const PreferenceLoss&, StreamView) override {}
  void dropout(TensorView, const Dropout&, TensorView, bool, StreamView) override {}
  void decode(const CodedWeight&, TensorView, StreamView) override {}
  void embedding(TensorView, TensorView, TensorView, const TokenRows&, TensorView, StreamView) override {}
  void embedding_backward(TensorView, TensorView, const TokenRows&, TensorView, TensorView, TensorView,
                          StreamView) override {}
  void adamw(const AdamPiece&, const AdamCoefficients&, StreamView) override {}
  void weights_of_master(const float*, bf16*, std::int64_t, StreamView) override {}
  void accumulate(float*, const bf16*, bool, std::int64_t, StreamView) override {}
  void accumulate(float*, const float*, bool, std::int64_t, StreamView) override {}
  void round(const float*, bf16*, std::int64_t, StreamView) override {}
  void norm_blocks(const bf16*, std::int64_t, double*, StreamView) override {}
  void norm_blocks(const float*, std::int64_t, double*, StreamView) override {}
};

/// Says that it has eight threads, and does all on the caller's.
class EightThreads final : public Parallel {
 public:
  int threads() const noexcept override { return 8; }
  void run(std::int64_t count, IndexFunction body) override {
    for (std::int64_t i = 0; i < count; ++i) body(i);
  }
};

class IdleKernels final : public UpdateKernels {
 public:
  void adamw(const AdamPiece&, const AdamCoefficients&, int most_threads) override { last_most_threads = most_threads; }
  std::int64_t speculate(const AdamPiece& piece, const AdamCoefficients&, const UndoPiece&, int) override {
    return piece.count;
  }
  void settle(const AdamPiece&, const AdamCoefficients&, const AdamCoefficients&, Settling, const UndoPiece&,
              int) override {}
  void weights_of_master(const float*, bf16*, std::int64_t) override {}
  void accumulate(float*, const bf16*, bool, std::int64_t) override {}
  void accumulate(float*, const float*, bool, std::int64_t) override {}
  void round(const float*, bf16*, std::int64_t) override {}
  void norm_blocks(const bf16*, std::int64_t, double*) override {}
  void norm_blocks(const float*, std::int64_t, double*) override {}
  int fp8_codes(const bf16*, std::int64_t, int exponent, std::uint8_t*, int) override { return exponent; }
  Parallel& parallel() noexcept override { return parallel_; }
  std::atomic<int> last_most_threads = -1;

 private:
  EightThreads parallel_;
};

class NamedStream final : public StreamImpl {
 public:
  explicit NamedStream(std::string_view name) : name_(name) {}
  const std::string& name() const noexcept override { return name_; }

 private:
  std::string name_;
};

/// Everything queued is done, that is nothing, when the call returns.
class IdleDevice : public Device {
 public:
  IdleDevice() {
    info_.kind = "none";
    info_.name = "nothing";
    info_.capacity = std::size_t{4} << 30;
  }
  const DeviceInfo& info() const noexcept override { return info_; }
  Stream make_stream(std::string_view name, StreamPriority = StreamPriority::usual) override {
    return Stream(std::make_unique<NamedStream>(name));
  }
  Stream wrap_stream(void*) override { throw MisuseError("no native streams"); }
  void require_own(StreamView) const override {}
  Event make_event() override { return Event(std::make_unique<EventImpl>()); }
  MemoryBlock allocate(std::size_t bytes, std::string_view) override { return take(bytes); }
  MemoryBlock allocate_pinned(std::size_t bytes, std::string_view) override { return take(bytes); }
  std::size_t allocated_bytes() const noexcept override { return 0; }
  std::size_t peak_bytes() const noexcept override { return 0; }
  void copy(void*, const void*, std::size_t, CopyKind, StreamView) override {}
  void copy_from(Device&, void*, const void*, std::size_t, StreamView) override {}
  void fill(void*, unsigned char, std::size_t, StreamView) override {}
  void record(EventView, StreamView) override {}
  void wait(StreamView, EventView) override {}
  void wait_for_peer(StreamView, Device&, EventView) override {}
  bool wait_for(EventView, std::chrono::milliseconds) override { return true; }
  void call_after(StreamView, std::function<void(std::exception_ptr)> then) override { then(nullptr); }
  void synchronize(StreamView) override {}
  Ops& ops() noexcept override { return ops_; }
  IdleKernels& host_kernels() noexcept override { return kernels_; }

 private:
  static MemoryBlock take(std::size_t bytes) {
    void* zeros = std::aligned_alloc(arena_alignment, align_up(bytes));
    if (zeros == nullptr) throw std::bad_alloc();
    std::memset(zeros, 0, bytes);
    return {zeros, bytes, [](void* p, std::size_t) { std::free(p); }};
  }
  DeviceInfo info_;
  IdleOps ops_;
  IdleKernels kernels_;
};

}  // namespace tandem::testing
