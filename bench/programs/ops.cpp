// Kernels at GPT-2's shapes (two sequences of 256 tokens), two threads; flop/s beside those of one plain
// single-threaded product of oneDNN per thread.
#include <benchmark/benchmark.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "cpu_ops/kernels/gemm.hpp"
#include "cpu_ops/kernels/kernels.hpp"
#include "cpu_ops/threads/parallel.hpp"

namespace tandem {
namespace {

constexpr std::int64_t tokens = 512, sequence = 256, channels = 768, vocabulary = 50257;
constexpr int threads = 2;

/// Memory of one tensor, filled with small numbers.
class Buffer {
 public:
  Buffer(DType dtype, Shape shape) : view_{nullptr, dtype, shape}, memory_(view_.bytes() + arena_alignment) {
    void* at = memory_.data();
    std::size_t space = memory_.size();
    view_.data = std::align(arena_alignment, view_.bytes(), at, space);
    for (std::int64_t i = 0; i < view_.count() && dtype != DType::i32; ++i) {
      const float value = 0.01F * static_cast<float>(i % 37 - 18);
      if (dtype == DType::bf16) {
        view_.as<bf16>()[i] = numerics::round_to_bf16(value);
      } else {
        view_.as<float>()[i] = value;
      }
    }
  }
  operator TensorView() const { return view_; }  // NOLINT: a view of it is meant
  std::byte* data() const { return static_cast<std::byte*>(view_.data); }

 private:
  TensorView view_;
  std::vector<std::byte> memory_;
};

class Lent {
 public:
  explicit Lent(std::size_t bytes)
      : buffer_(DType::f32, {static_cast<std::int64_t>(align_up(bytes) / sizeof(float))}), bytes_(align_up(bytes)) {}
  operator fast::Workspace() const { return {buffer_.data(), bytes_}; }  // NOLINT

 private:
  Buffer buffer_;
  std::size_t bytes_;
};

DType activations(const benchmark::State& state, std::size_t argument) {
  return state.range(argument) == 0 ? DType::f32 : DType::bf16;
}

void report(benchmark::State& state, double flop) {
  state.counters["flop/s"] =
      benchmark::Counter(flop * static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
}

/// One product (tokens, in) x (in, out) of fp32 on each thread at once: what the tiles are measured against.
void raw_gemm(benchmark::State& state) {
  const std::int64_t in = state.range(0), out = state.range(1);
  const auto parallel = make_parallel(threads);
  std::vector<Buffer> a, b, c;
  for (int i = 0; i < threads; ++i) {
    a.emplace_back(DType::f32, Shape{tokens, in});
    b.emplace_back(DType::f32, Shape{out, in});
    c.emplace_back(DType::f32, Shape{tokens, out});
  }
  const auto pointer = [](const Buffer& x) { return TensorView(x).as<float>(); };
  for (auto _ : state) {
    parallel->run(threads, [&](std::int64_t index) {
      const auto i = static_cast<std::size_t>(index);
      fast::gemm(fast::Op::plain, fast::Op::transposed, tokens, out, in, 1.0F, pointer(a[i]), in, pointer(b[i]), in,
                 0.0F, pointer(c[i]), out);
    });
  }
  report(state, 2.0 * threads * static_cast<double>(tokens * in * out));
}

struct LinearOperands {
  LinearOperands(std::int64_t in, std::int64_t out, DType dtype)
      : x(dtype, {tokens, in}),
        y(dtype, {tokens, out}),
        w(DType::bf16, {out, in}),
        bias(DType::bf16, {out}),
        dw(DType::bf16, {out, in}),
        dbias(DType::f32, {out}),
        workspace(fast::linear_scratch(tokens, in, out, dtype, threads)) {}
  Buffer x, y, w, bias, dw, dbias;
  Lent workspace;
};

template <class Kernel>
void measure_linear(benchmark::State& state, const Kernel& kernel) {
  const auto parallel = make_parallel(threads);
  const LinearOperands o(state.range(0), state.range(1), activations(state, 2));
  for (auto _ : state) kernel(*parallel, o);
  report(state, 2.0 * static_cast<double>(tokens * state.range(0) * state.range(1)));
}

/// Operands of products of experts: `tokens` tokens, experts and choices per token by arguments 3 and 4, from `in` to
/// `out`.
struct ExpertOperands {
  ExpertOperands(std::int64_t in, std::int64_t out, std::int64_t count, std::int64_t choices, DType dtype)
      : x(dtype, {tokens, in}),
        y(dtype, {tokens * choices, out}),
        w(DType::bf16, {count, out, in}),
        dw(DType::bf16, {count, out, in}),
        experts(DType::i32, {tokens, choices}),
        routing_weights(DType::f32, {tokens, choices}),
        begins(DType::i32, {count + 1}),
        slots(DType::i32, {tokens * choices}),
        rows(DType::i32, {tokens, choices}),
        dx(dtype, {tokens * choices, in}),
        workspace(fast::expert_scratch(tokens, in, out, threads)) {
    const Buffer logits(DType::f32, {tokens, count});
    float* const values = TensorView(logits).as<float>();
    for (std::int64_t i = 0; i < tokens * count; ++i) values[i] = static_cast<float>(i * 2654435761 % 1009);
    fast::route(*make_parallel(1), logits, true, routing());
  }
  Routing routing() const { return {experts, routing_weights, begins, slots, rows}; }
  Buffer x, y, w, dw, experts, routing_weights, begins, slots, rows, dx;
  Lent workspace;
};

template <class Kernel>
void measure_experts(benchmark::State& state, const Kernel& kernel) {
  const auto parallel = make_parallel(threads);
  const ExpertOperands o(state.range(0), state.range(1), state.range(3), state.range(4), activations(state, 2));
  for (auto _ : state) kernel(*parallel, o);
  report(state, 2.0 * static_cast<double>(tokens * state.range(4) * state.range(0) * state.range(1)));
}

void expert_linear(benchmark::State& state) {
  measure_experts(state, [](Parallel& p, const ExpertOperands& o) {
    fast::expert_linear(p, o.workspace, {o.x, true}, o.w, o.routing(), o.y);
  });
}
void expert_backward_input(benchmark::State& state) {
  measure_experts(state, [](Parallel& p, const ExpertOperands& o) {
    fast::expert_backward_input(p, o.workspace, {o.y}, o.w, o.routing(), o.dx, false);
  });
}
void expert_backward_weight(benchmark::State& state) {
  measure_experts(state, [](Parallel& p, const ExpertOperands& o) {
    fast::expert_backward_weight(p, o.workspace, {o.y}, {o.x, true}, o.routing(), o.dw);
  });
}

void linear(benchmark::State& state) {
  measure_linear(state,
                 [](Parallel& p, const LinearOperands& o) { fast::linear(p, o.workspace, o.x, o.w, o.bias, o.y); });
}
void linear_backward_input(benchmark::State& state) {
  measure_linear(state, [](Parallel& p, const LinearOperands& o) {
    fast::linear_backward_input(p, o.workspace, o.y, o.w, o.x, false);
  });
}
void linear_backward_weight(benchmark::State& state) {
  measure_linear(state, [](Parallel& p, const LinearOperands& o) {
    fast::linear_backward_weight(p, o.workspace, o.y, o.x, o.dw, o.dbias);
  });
}

void head_loss(benchmark::State& state) {
  const DType dtype = activations(state, 0);
  const bool gradient = state.range(1) != 0;
  const auto parallel = make_parallel(threads);
  const Buffer x(dtype, {tokens, channels}), w(DType::bf16, {vocabulary, channels}), targets(DType::i32, {tokens});
  const Buffer losses(DType::f32, {tokens}), dx(dtype, {tokens, channels}), dw(DType::f32, {vocabulary, channels});
  const Lent workspace(fast::head_loss_scratch(tokens, channels, vocabulary, dtype, threads));
  const HeadLoss head{.x = x,
                      .weight = w,
                      .targets = targets,
                      .losses = losses,
                      .gradient_scale = 1.0F,
                      .dx = gradient ? dx : TensorView{},
                      .dweight = gradient ? dw : TensorView{}};
  for (auto _ : state) fast::head_loss(*parallel, workspace, head);
  report(state, (gradient ? 6.0 : 2.0) * static_cast<double>(tokens * channels * vocabulary));
}

/// Pairs of sequences, of which the losses of all tokens are there.
void preference_loss(benchmark::State& state) {
  const std::int64_t pairs = state.range(0), length = state.range(1);
  const auto parallel = make_parallel(threads);
  const Buffer losses(DType::f32, {2 * pairs, length}), reference(DType::f32, {2 * pairs});
  const Buffer factors(DType::f32, {2 * pairs}), results(DType::f32, {pairs, 3});
  const PreferenceLoss of{.losses = losses, .reference = reference, .sequence_factors = factors, .pairs = results};
  for (auto _ : state) fast::preference_loss(*parallel, of);
  state.SetBytesProcessed(state.iterations() * 2 * pairs * length * 4);
}

constexpr AttentionShape gpt2_heads{
    .batch = tokens / sequence, .sequence = sequence, .heads = 12, .kv_heads = 12, .head_dim = 64, .scale = 0.125F};

/// Counts the lower triangle only, as the literature does.
double attention_flop(const AttentionShape& s) {
  return 2.0 * static_cast<double>(s.batch * s.heads * s.sequence * (s.sequence + 1) * s.head_dim);
}

void attention(benchmark::State& state) {
  const DType dtype = activations(state, 0);
  const auto parallel = make_parallel(threads);
  const Buffer qkv(dtype, {tokens, 3 * channels}), dqkv(dtype, {tokens, 3 * channels});
  const Buffer out(dtype, {gpt2_heads.batch, sequence, channels}), dout(dtype, {gpt2_heads.batch, sequence, channels});
  const Buffer lse(DType::f32, {gpt2_heads.batch, gpt2_heads.heads, sequence});
  const Lent workspace(fast::attention_backward_scratch(sequence, gpt2_heads.head_dim, threads));
  const auto part = [&](const Buffer& b, std::int64_t i) {
    return HeadsView{b.data() + static_cast<std::size_t>(i * channels) * size_of(dtype), dtype, 3 * channels};
  };
  const bool backward = state.range(1) != 0;
  for (auto _ : state) {
    if (backward) {
      fast::attention_backward(*parallel, workspace, dout, part(qkv, 0), part(qkv, 1), part(qkv, 2), out, lse,
                               part(dqkv, 0), part(dqkv, 1), part(dqkv, 2), gpt2_heads);
    } else {
      fast::attention(*parallel, workspace, part(qkv, 0), part(qkv, 1), part(qkv, 2), out, lse, gpt2_heads);
    }
  }
  report(state, (backward ? 2.5 : 1.0) * attention_flop(gpt2_heads));
}

void pointwise(benchmark::State& state) {
  const DType dtype = activations(state, 0);
  const auto parallel = make_parallel(threads);
  const Shape wide{tokens, 4 * channels}, narrow{tokens, channels};
  const Buffer a(dtype, wide), b(dtype, wide), x(dtype, narrow), y(dtype, narrow), w(DType::bf16, {channels});
  const Buffer mean(DType::f32, {tokens}), rstd(DType::f32, {tokens}), dw(DType::f32, {channels}),
      db(DType::f32, {channels});
  for (auto _ : state) {
    switch (state.range(1)) {
      case 0:
        fast::gelu(*parallel, a, b);
        break;
      case 1:
        fast::gelu_backward(*parallel, b, a, b);
        break;
      case 2:
        fast::layer_norm(*parallel, x, w, w, y, mean, rstd, 1e-5F);
        break;
      default:
        fast::layer_norm_backward(*parallel, y, x, w, mean, rstd, y, false, dw, db);
        break;
    }
  }
}

/// Codes of a matrix (O, I) to bf16, beside a copy of as many bytes as that reads and writes: 0, then int8 to fp8.
void decode(benchmark::State& state) {
  constexpr std::int64_t rows = 4096, columns = 4096;
  const auto code = static_cast<WeightCode>(state.range(0));
  const auto parallel = make_parallel(threads);
  const std::int64_t scales = scale_floats(code, {1, rows, columns});
  const std::int64_t code_bytes = code == WeightCode::none ? 2 * rows * columns : rows * columns * code_bits(code) / 8;
  const Buffer codes(DType::f32, {code_bytes / 4}), factors(DType::f32, {scales + 1});
  const Buffer weight(DType::bf16, {rows, columns});
  constexpr std::int64_t pieces = 256, bytes = 2 * rows * columns / pieces;
  for (auto _ : state) {
    if (code == WeightCode::none) {
      parallel->run(pieces,
                    [&](std::int64_t i) { std::memcpy(weight.data() + i * bytes, codes.data() + i * bytes, bytes); });
    } else {
      fast::decode(*parallel, {code, codes.data(), TensorView(factors).as<float>()}, weight);
    }
  }
  const auto moved = static_cast<double>(code_bytes + scales * 4 + 2 * rows * columns);
  state.counters["bytes/s"] =
      benchmark::Counter(moved * static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
}

/// Inputs of an adapter in training: a million elements, with the result added or not.
void dropout(benchmark::State& state) {
  const DType type = state.range(0) != 0 ? DType::bf16 : DType::f32;
  const auto parallel = make_parallel(threads);
  const Buffer x(type, {1024, 1024}), y(type, {1024, 1024});
  const Dropout of{.rate = 0.1F, .seed = 1, .stream = 2, .first = 3};
  for (auto _ : state) fast::dropout(*parallel, x, of, y, state.range(1) != 0);
  state.counters["elements/s"] =
      benchmark::Counter(1024.0 * 1024.0 * static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
}

void gpt2_products(benchmark::internal::Benchmark* b) {
  const std::int64_t shapes[][2] = {{768, 2304}, {768, 768}, {768, 3072}, {3072, 768}};
  for (const std::int64_t bf16_activations : {0, 1}) {
    for (const auto& s : shapes) b->Args({s[0], s[1], bf16_activations});
  }
  b->ArgNames({"in", "out", "bf16"});
}

/// Arguments for one expert that takes all rows, for a few experts with many rows, and for OLMoE's and Qwen3's with
/// few.
void expert_products(benchmark::internal::Benchmark* b) {
  const std::int64_t counts[][2] = {{1, 1}, {8, 2}, {64, 8}, {128, 8}};
  for (const std::int64_t bf16_activations : {0, 1}) {
    for (const auto& c : counts) b->Args({2048, 768, bf16_activations, c[0], c[1]});
  }
  b->ArgNames({"in", "out", "bf16", "experts", "chosen"});
}

BENCHMARK(raw_gemm)->Args({768, 2304})->Args({768, 768})->Args({768, 3072})->Args({3072, 768})->UseRealTime();
BENCHMARK(linear)->Apply(gpt2_products)->UseRealTime();
BENCHMARK(linear_backward_input)->Apply(gpt2_products)->UseRealTime();
BENCHMARK(linear_backward_weight)->Apply(gpt2_products)->UseRealTime();
BENCHMARK(expert_linear)->Apply(expert_products)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(expert_backward_input)->Apply(expert_products)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(expert_backward_weight)->Apply(expert_products)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(head_loss)
    ->ArgsProduct({{0, 1}, {0, 1}})
    ->ArgNames({"bf16", "gradient"})
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK(preference_loss)->Args({1, 1024})->Args({8, 4096})->ArgNames({"pairs", "tokens"})->UseRealTime();
BENCHMARK(attention)->ArgsProduct({{0, 1}, {0, 1}})->ArgNames({"bf16", "backward"})->UseRealTime();
BENCHMARK(decode)->DenseRange(0, 4)->ArgNames({"code"})->UseRealTime();
BENCHMARK(dropout)->ArgsProduct({{0, 1}, {0, 1}})->ArgNames({"bf16", "accumulate"})->UseRealTime();
BENCHMARK(pointwise)->ArgsProduct({{0, 1}, {0, 1, 2, 3}})->ArgNames({"bf16", "gelu/d/norm/d"})->UseRealTime();

}  // namespace
}  // namespace tandem

BENCHMARK_MAIN();
