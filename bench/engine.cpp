// CPU time that the engine itself takes in a step: guards, queues, bookkeeping. The device does nothing, at
// once, so that nothing else is counted: 48 layers, 1,008 subgroups. One line of JSON.
//
//   bench_engine [POLICY]
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <tandem/tandem.hpp>
#include <vector>

#include "core/ops.hpp"

namespace {

using namespace tandem;

class NoOps final : public Ops {
 public:
  std::size_t workspace_bytes(const WorkspaceNeeds&) const override { return 0; }
  void bind_workspace(void*, std::size_t) override {}
  void linear(TensorView, TensorView, TensorView, TensorView, StreamView) override {}
  void linear_backward_input(TensorView, TensorView, TensorView, bool, StreamView) override {}
  void linear_backward_weight(TensorView, TensorView, TensorView, TensorView, StreamView) override {}
  void head_loss(const HeadLoss&, StreamView) override {}
  void attention(HeadsView, HeadsView, HeadsView, TensorView, TensorView, const AttentionShape&, StreamView) override {}
  void attention_backward(TensorView, HeadsView, HeadsView, HeadsView, TensorView, TensorView, HeadsView, HeadsView,
                          HeadsView, const AttentionShape&, StreamView) override {}
  void rope(TensorView, TensorView, bool, StreamView) override {}
  void layer_norm(TensorView, TensorView, TensorView, TensorView, TensorView, TensorView, float, StreamView) override {}
  void layer_norm_backward(TensorView, TensorView, TensorView, TensorView, TensorView, TensorView, bool, TensorView,
                           TensorView, StreamView) override {}
  void rms_norm(TensorView, TensorView, TensorView, TensorView, float, StreamView) override {}
  void rms_norm_backward(TensorView, TensorView, TensorView, TensorView, TensorView, bool, TensorView,
                         StreamView) override {}
  void gelu(TensorView, TensorView, StreamView) override {}
  void gelu_backward(TensorView, TensorView, TensorView, StreamView) override {}
  void swiglu(TensorView, TensorView, TensorView, StreamView) override {}
  void swiglu_backward(TensorView, TensorView, TensorView, TensorView, TensorView, StreamView) override {}
  void add(TensorView, TensorView, TensorView, StreamView) override {}
  void embedding(TensorView, TensorView, TensorView, std::int64_t, TensorView, StreamView) override {}
  void embedding_backward(TensorView, TensorView, std::int64_t, TensorView, TensorView, StreamView) override {}
  void adamw(const AdamPiece&, const AdamCoefficients&, StreamView) override {}
  void weights_of_master(const float*, bf16*, std::int64_t, StreamView) override {}
  void accumulate(float*, const bf16*, bool, std::int64_t, StreamView) override {}
  void round(const float*, bf16*, std::int64_t, StreamView) override {}
  void norm_blocks(const bf16*, std::int64_t, double*, StreamView) override {}
};

class NoKernels final : public UpdateKernels {
 public:
  void adamw(const AdamPiece&, const AdamCoefficients&) override {}
  void weights_of_master(const float*, bf16*, std::int64_t) override {}
  void accumulate(float*, const bf16*, bool, std::int64_t) override {}
  void round(const float*, bf16*, std::int64_t) override {}
  void norm_blocks(const bf16*, std::int64_t, double*) override {}
  int threads() const noexcept override { return 1; }
};

class NamedStream final : public StreamImpl {
 public:
  explicit NamedStream(std::string_view name) : name_(name) {}
  const std::string& name() const noexcept override { return name_; }

 private:
  std::string name_;
};

/// Everything queued is done when the call returns.
class NoDevice final : public Device {
 public:
  NoDevice() {
    info_.kind = "none";
    info_.name = "nothing";
    info_.capacity = std::size_t{4} << 30;
  }
  const DeviceInfo& info() const noexcept override { return info_; }
  Stream make_stream(std::string_view name) override { return Stream(std::make_unique<NamedStream>(name)); }
  Stream wrap_stream(void*) override { throw MisuseError("no native streams"); }
  Event make_event() override { return Event(std::make_unique<EventImpl>()); }
  MemoryBlock allocate(std::size_t bytes, std::string_view) override { return take(bytes); }
  MemoryBlock allocate_pinned(std::size_t bytes, std::string_view) override { return take(bytes); }
  std::size_t allocated_bytes() const noexcept override { return 0; }
  std::size_t peak_bytes() const noexcept override { return 0; }
  void copy(void*, const void*, std::size_t, CopyKind, StreamView) override {}
  void fill_zero(void*, std::size_t, StreamView) override {}
  void record(EventView, StreamView) override {}
  void wait(StreamView, EventView) override {}
  bool wait_for(EventView, std::chrono::milliseconds) override { return true; }
  void call_after(StreamView, std::function<void(std::exception_ptr)> then) override { then(nullptr); }
  void synchronize(StreamView) override {}
  Ops& ops() noexcept override { return ops_; }
  UpdateKernels& host_kernels() noexcept override { return kernels_; }

 private:
  static MemoryBlock take(std::size_t bytes) {
    return {std::aligned_alloc(arena_alignment, align_up(bytes)), bytes, [](void* p, std::size_t) { std::free(p); }};
  }
  DeviceInfo info_;
  NoOps ops_;
  NoKernels kernels_;
};

double cpu_seconds() {
  timespec t{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

constexpr int layers = 48, parameters_each = 21, steps = 60, warm_up = 10;

void step(OffloadEngine& engine, StreamView stream) {
  engine.begin_step({});
  for (int l = 0; l < layers; ++l) engine.fetch(l, stream);
  for (int l = layers - 1; l >= 0; --l) {
    const WeightsGuard weights = engine.fetch(l, stream);
    engine.gradients(l, stream).commit(stream);
  }
  engine.end_step();
}

int run(const std::string& policy) {
  NoDevice device;
  ParameterLayout layout;
  for (int l = 0; l < layers; ++l) {
    layout.add_layer("h." + std::to_string(l)).add("w", {parameters_each * layout_quantum});
  }
  OffloadOptions options;
  options.policy = parse_policy(policy);
  options.subgroup_size = layout_quantum;
  options.resident_layers = 0;
  options.prefetch_layers = 2;
  const Plan plan = make_plan(layout, options, {device.info().capacity, 0});
  OffloadEngine engine(device, layout, options, plan);
  const Stream stream = device.make_stream("compute");
  for (int i = 0; i < warm_up; ++i) step(engine, stream);
  std::vector<double> milliseconds;
  for (int i = 0; i < steps; ++i) {
    const double begin = cpu_seconds();
    step(engine, stream);
    engine.wait();
    milliseconds.push_back(1e3 * (cpu_seconds() - begin));
  }
  std::sort(milliseconds.begin(), milliseconds.end());
  std::cout << nlohmann::json{{"policy", policy},
                              {"subgroups", plan.subgroups.size()},
                              {"cpu_ms", milliseconds[steps / 2]},
                              {"least", milliseconds.front()},
                              {"most", milliseconds.back()}}
                   .dump()
            << std::endl;
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc > 1 ? argv[1] : "interleave:2");
  } catch (const std::exception& error) {
    std::cerr << "bench_engine: " << error.what() << '\n';
    return 1;
  }
}
