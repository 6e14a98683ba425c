// Rates of a GPU: copies over the link and within its memory, and the kernels that memory bounds, beside them.
// Bytes are those that the operation must move, so that each rate can be held against that of the copy.
#include <benchmark/benchmark.h>

#include <cstdio>
#include <memory>

#include "api/open_device.hpp"
#include "core/error.hpp"
#include "core/ops.hpp"

namespace tandem {
namespace {

constexpr std::int64_t elements = 100 << 20;
constexpr std::int64_t channels = 4096;
constexpr std::int64_t rows = elements / channels;

/// A device with room for the operands of every benchmark, filled with zeros.
struct Gpu {
  std::unique_ptr<Device> device = open_device("cuda");
  Stream stream = device->make_stream("bench");
  MemoryBlock block = device->allocate(static_cast<std::size_t>(elements) * 16, "operands");
  MemoryBlock host = device->allocate_pinned(static_cast<std::size_t>(elements) * 2, "host");
  Gpu() { device->fill_zero(block.data(), block.bytes(), stream); }

  /// `count` elements of 4 bytes, from the n-th quarter of the block.
  float* quarter(int n) { return static_cast<float*>(block.data()) + n * elements; }
  TensorView rows_of(int n, DType dtype) { return {quarter(n), dtype, {rows, channels}}; }
};

std::unique_ptr<Gpu> gpu;

template <class Work>
void measure(benchmark::State& state, std::int64_t bytes, Work work) {
  constexpr int queued = 10;  // so that launching costs nothing beside running
  work();
  gpu->device->synchronize(gpu->stream);
  for (auto _ : state) {
    for (int i = 0; i < queued; ++i) work();
    gpu->device->synchronize(gpu->stream);
  }
  state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations()) * queued * bytes);
}

void copy(benchmark::State& state, void* to, const void* from, CopyKind kind, std::int64_t moved) {
  const auto bytes = static_cast<std::size_t>(elements) * 2;
  measure(state, moved, [&] { gpu->device->copy(to, from, bytes, kind, gpu->stream); });
}

void host_to_device(benchmark::State& state) {
  copy(state, gpu->quarter(0), gpu->host.data(), CopyKind::host_to_device, elements * 2);
}
void device_to_host(benchmark::State& state) {
  copy(state, gpu->host.data(), gpu->quarter(0), CopyKind::device_to_host, elements * 2);
}
void device_to_device(benchmark::State& state) {
  copy(state, gpu->quarter(1), gpu->quarter(0), CopyKind::device_to_device, elements * 4);
}

void adamw(benchmark::State& state) {
  // Gradient and weight share the last quarter: 28 bytes for each element.
  auto* const half = reinterpret_cast<bf16*>(gpu->quarter(3));
  const AdamPiece piece{gpu->quarter(0), gpu->quarter(1), gpu->quarter(2), half, half + elements, elements};
  const AdamCoefficients c{};
  measure(state, elements * 28, [&] { gpu->device->ops().adamw(piece, c, gpu->stream); });
}

void accumulate(benchmark::State& state) {
  const auto* const gradient = reinterpret_cast<const bf16*>(gpu->quarter(1));
  measure(state, elements * 10,
          [&] { gpu->device->ops().accumulate(gpu->quarter(0), gradient, false, elements, gpu->stream); });
}

void rms_norm(benchmark::State& state) {
  const TensorView x = gpu->rows_of(0, DType::bf16);
  const TensorView y = gpu->rows_of(1, DType::bf16);
  const TensorView weight{gpu->quarter(2), DType::bf16, {channels}};
  const TensorView rstd{gpu->quarter(3), DType::f32, {rows}};
  measure(state, elements * 4, [&] { gpu->device->ops().rms_norm(x, weight, y, rstd, 1e-5F, gpu->stream); });
}

void swiglu(benchmark::State& state) {
  const TensorView gate = gpu->rows_of(0, DType::bf16);
  const TensorView up = gpu->rows_of(1, DType::bf16);
  const TensorView y = gpu->rows_of(2, DType::bf16);
  measure(state, elements * 6, [&] { gpu->device->ops().swiglu(gate, up, y, gpu->stream); });
}

BENCHMARK(device_to_device)->UseRealTime();
BENCHMARK(host_to_device)->UseRealTime();
BENCHMARK(device_to_host)->UseRealTime();
BENCHMARK(adamw)->UseRealTime();
BENCHMARK(accumulate)->UseRealTime();
BENCHMARK(rms_norm)->UseRealTime();
BENCHMARK(swiglu)->UseRealTime();

int run(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  try {
    gpu = std::make_unique<Gpu>();
    benchmark::AddCustomContext("device", gpu->device->info().name);
    benchmark::RunSpecifiedBenchmarks();
    gpu.reset();
  } catch (const Error& error) {
    std::fprintf(stderr, "bench_gpu: %s\n", error.what());
    return static_cast<int>(error.exit_code());
  }
  return 0;
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) { return tandem::run(argc, argv); }
