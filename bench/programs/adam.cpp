// AdamW over 64 Mi parameters, bf16 gradient in, bf16 weight out, beside a plain copy: how much of the
// memory's rate the update reaches. Argument: threads.
#include <benchmark/benchmark.h>

#include <cstdlib>
#include <cstring>
#include <memory>

#include "cpu_ops/threads/parallel.hpp"
#include "cpu_ops/update/update_kernels.hpp"

namespace tandem {
namespace {

constexpr std::int64_t parameters = std::int64_t{64} << 20;
/// master, m, v read and written; gradient read; weight written.
constexpr std::int64_t bytes_per_parameter = 28;

template <class T>
class Array {
 public:
  explicit Array(Parallel& parallel)
      : data_(static_cast<T*>(std::aligned_alloc(4096, static_cast<std::size_t>(parameters) * sizeof(T)))) {
    constexpr std::int64_t part = parameters / 64;
    parallel.run(64, [&](std::int64_t i) { std::memset(data_.get() + i * part, 0, part * sizeof(T)); });
  }
  T* get() { return data_.get(); }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T, Free> data_;
};

void adamw_fp32(benchmark::State& state) {
  const std::shared_ptr<Parallel> parallel = make_parallel(static_cast<int>(state.range(0)));
  const auto kernels = make_host_update_kernels(parallel);
  Array<float> master(*parallel), m(*parallel), v(*parallel);
  Array<bf16> gradient(*parallel), weight(*parallel);
  for (std::int64_t i = 0; i < parameters; ++i) {
    gradient.get()[i] = numerics::round_to_bf16(1e-3F * static_cast<float>(i % 251 - 125));
  }
  std::int64_t step = 0;
  for (auto _ : state) {
    kernels->adamw({{master.get(), m.get(), v.get()}, gradient.get(), weight.get(), parameters},
                   numerics::adam_coefficients({}, ++step, 1e-4, 1.0, true));
  }
  state.SetBytesProcessed(state.iterations() * parameters * bytes_per_parameter);
  state.SetItemsProcessed(state.iterations() * parameters);
}

/// One array of fp32 read, another written with ordinary stores: 8 bytes an element.
void copy_loop(benchmark::State& state) {
  const auto parallel = make_parallel(static_cast<int>(state.range(0)));
  Array<float> from(*parallel), to(*parallel);
  constexpr std::int64_t part = 64 * 1024;
  for (auto _ : state) {
    parallel->run(parameters / part, [&](std::int64_t i) {
      const float* const source = from.get() + i * part;
      float* const target = to.get() + i * part;
      for (std::int64_t j = 0; j < part; ++j) target[j] = source[j] + 1.0F;
    });
  }
  state.SetBytesProcessed(state.iterations() * parameters * 8);
}

BENCHMARK(adamw_fp32)->Arg(1)->Arg(2)->ArgName("threads")->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(copy_loop)->Arg(1)->Arg(2)->ArgName("threads")->UseRealTime()->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace tandem

BENCHMARK_MAIN();
