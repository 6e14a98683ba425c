// Rates of a GPU: copies over the link and within its memory, and beside them the kernels that memory bounds; matrix
// products as a training step asks for them, beside a large square one. Bytes and operations are those that the work
// must move and do, so that each rate can be held against that of the copy or the product.
//
// bench_gpu [--small] [--benchmark_...]: --small makes everything so small that it runs at once wherever there is a
// device; its rates mean nothing.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "api/open_device.hpp"
#include "core/base/error.hpp"
#include "core/numerics/adam.hpp"
#include "core/ops/ops.hpp"

namespace tandem {
namespace {

constexpr float eps = 1e-5F;

struct Product {
  std::string name;
  std::int64_t tokens, in, out;
};

struct Heads {
  std::string name;
  AttentionShape shape;
};

/// Sizes of a mixture of experts.
struct Experts {
  std::string name;
  std::int64_t tokens, channels, inner, experts, choices;

  std::int64_t rows() const { return tokens * choices; }
};

/// Sizes of everything that is measured.
struct Sizes {
  std::int64_t elements, channels, head_dim;
  std::vector<Product> products;
  std::vector<Heads> heads;
  Product head;  ///< out: the vocabulary
  Experts experts;

  std::int64_t rows() const { return elements / channels; }
};

AttentionShape heads_of(std::int64_t batch, std::int64_t sequence, std::int64_t heads, std::int64_t kv_heads,
                        std::int64_t head_dim) {
  return {.batch = batch,
          .sequence = sequence,
          .heads = heads,
          .kv_heads = kv_heads,
          .head_dim = head_dim,
          .scale = 0.125F};
}

/// Shapes of GPT-2 XL, and of Llama models of 7 and 8 billion parameters, with 8,192 tokens; of attention with twice as
/// many in one sequence, whose backward is not cuDNN's, and with the wide heads of Gemma 3 4B, whose backward is not
/// cuDNN's on GeForce cards; and of the experts of Qwen3-30B-A3B, with 4,096 tokens.
Sizes full_sizes() {
  constexpr std::int64_t tokens = 8192;
  return {.elements = 100 << 20,
          .channels = 4096,
          .head_dim = 128,
          .products = {{"square", tokens, 8192, 8192},
                       {"gpt2_xl_qkv", tokens, 1600, 4800},
                       {"gpt2_xl_up", tokens, 1600, 6400},
                       {"llama_7b_out", tokens, 4096, 4096},
                       {"llama_7b_up", tokens, 4096, 11008}},
          .heads = {{"gpt2_xl", heads_of(8, 1024, 25, 25, 64)},
                    {"llama_7b", heads_of(4, 2048, 32, 32, 128)},
                    {"llama_8b", heads_of(4, 2048, 32, 8, 128)},
                    {"llama_8b_long", heads_of(1, 16384, 32, 8, 128)},
                    {"gemma3_4b", heads_of(4, 2048, 8, 4, 256)}},
          .head = {"gpt2_xl", tokens, 1600, 50257},
          .experts = {"qwen3_30b", tokens / 2, 2048, 768, 128, 8}};
}

Sizes small_sizes() {
  return {.elements = 16 << 10,
          .channels = 128,
          .head_dim = 32,
          .products = {{"square", 32, 32, 32}, {"odd", 24, 48, 40}},
          .heads = {{"plain", heads_of(1, 16, 2, 2, 16)}, {"grouped", heads_of(2, 16, 4, 2, 16)}},
          .head = {"small", 32, 16, 61},
          .experts = {"small", 12, 16, 24, 4, 2}};
}

/// A device with eight slots of two bytes for each element, and with scratch for all operations.
class Gpu {
 public:
  static constexpr int slots = 8;

  explicit Gpu(Sizes sizes)
      : sizes_(std::move(sizes)),
        device_(open_device("cuda",
                            {.warning = [](const std::string& line) { std::fprintf(stderr, "%s\n", line.c_str()); }})),
        stream_(device_->make_stream("bench")),
        positive_(device_->allocate_pinned(slot_bytes(), "host, positive")),
        any_(device_->allocate_pinned(slot_bytes(), "host")),
        block_(device_->allocate(slots * slot_bytes(), "operands")) {
    std::size_t scratch = 1;
    for (const WorkspaceNeeds& needs : all_needs()) scratch = std::max(scratch, device_->ops().workspace_bytes(needs));
    scratch_ = device_->allocate(scratch, "scratch");
    device_->ops().bind_workspace(scratch_.data(), scratch_.bytes());
    make_values();
  }

  const Sizes& sizes() const { return sizes_; }
  Device& device() { return *device_; }
  Ops& ops() { return device_->ops(); }
  StreamView stream() const { return stream_; }
  std::size_t slot_bytes() const { return static_cast<std::size_t>(sizes_.elements) * sizeof(bf16); }
  void* host() { return any_.data(); }

  template <class T>
  T* slot(int n) {
    return reinterpret_cast<T*>(static_cast<std::byte*>(block_.data()) + static_cast<std::size_t>(n) * slot_bytes());
  }
  TensorView rows(int n) { return {slot<bf16>(n), DType::bf16, {sizes_.rows(), sizes_.channels}}; }

  /// Values as a run has them: neither zeros, which are faster than they should be, nor what the last benchmark left.
  /// Second moments (slots 4 and 5) are positive.
  void fill() {
    for (int n = 0; n < slots; ++n) {
      const MemoryBlock& from = n == 4 || n == 5 ? positive_ : any_;
      device_->copy(slot<bf16>(n), from.data(), slot_bytes(), CopyKind::host_to_device, stream_);
    }
    device_->synchronize(stream_);
  }

  /// Operands that are not of `elements`: one after another in the slots.
  class Taker {
   public:
    explicit Taker(Gpu& gpu) : gpu_(gpu) {}
    TensorView take(Shape shape, DType dtype) {
      const TensorView view{gpu_.slot<std::byte>(0) + at_, dtype, shape};
      at_ += align_up(view.bytes());
      if (at_ > slots * gpu_.slot_bytes()) throw MisuseError("bench_gpu", "the operands do not fit into the slots");
      return view;
    }

   private:
    Gpu& gpu_;
    std::size_t at_ = 0;
  };

 private:
  std::vector<WorkspaceNeeds> all_needs() const {
    std::vector<WorkspaceNeeds> all;
    for (const Product& p : sizes_.products) {
      all.push_back({p.tokens, p.tokens, 1, std::max(p.in, p.out), 1, 1, sizes_.head_dim, DType::bf16});
    }
    for (const auto& [name, s] : sizes_.heads) {
      all.push_back(
          {s.batch * s.sequence, s.sequence, 1, s.heads * s.head_dim, s.heads, s.kv_heads, s.head_dim, DType::bf16});
    }
    const Product& h = sizes_.head;
    all.push_back({h.tokens, h.tokens, h.out, h.in, 1, 1, sizes_.head_dim, DType::bf16});
    all.push_back({sizes_.rows(), sizes_.rows(), 1, sizes_.channels, 1, 1, sizes_.head_dim, DType::bf16});
    return all;
  }

  /// bf16 from 1/16 to 2; two of them are an fp32 of the same range.
  void make_values() {
    std::mt19937 random(1);
    auto* const positive = static_cast<std::uint16_t*>(positive_.data());
    auto* const any = static_cast<std::uint16_t*>(any_.data());
    constexpr unsigned exponent_of_sixteenth = 123, mantissa_bits = 7;
    for (std::int64_t i = 0; i < sizes_.elements; ++i) {
      const auto bits = static_cast<unsigned>(random());
      const unsigned magnitude = (exponent_of_sixteenth + (bits >> 8) % 5) << mantissa_bits | (bits & 0x7fU);
      positive[i] = static_cast<std::uint16_t>(magnitude);
      any[i] = static_cast<std::uint16_t>(magnitude | (bits & 0x8000U));
    }
  }

  Sizes sizes_;
  std::unique_ptr<Device> device_;
  Stream stream_;
  MemoryBlock positive_, any_;
  MemoryBlock block_, scratch_;
};

/// Work that can be done over and over. `bytes` and `flop` of one time; 0: not counted.
struct Work {
  double bytes = 0.0;
  double flop = 0.0;
  std::function<void()> run{};
};

void measure(benchmark::State& state, Gpu& gpu, const std::function<Work(Gpu&)>& prepare) {
  constexpr int queued = 20;  // so that launching and waiting cost nothing beside running
  gpu.fill();
  const Work work = prepare(gpu);
  work.run();  // first touches, plans and lazy set-ups
  gpu.device().synchronize(gpu.stream());
  for (auto _ : state) {
    for (int i = 0; i < queued; ++i) work.run();
    gpu.device().synchronize(gpu.stream());
  }
  const double times = static_cast<double>(state.iterations()) * queued;
  using benchmark::Counter;
  if (work.bytes > 0.0) state.counters["bytes_per_second"] = Counter(times * work.bytes, Counter::kIsRate);
  if (work.flop > 0.0) state.counters["flop_per_second"] = Counter(times * work.flop, Counter::kIsRate);
  state.counters["seconds"] = Counter(times, Counter::kIsRate | Counter::kInvert);
}

void add(Gpu& gpu, const std::string& name, std::function<Work(Gpu&)> prepare) {
  benchmark::RegisterBenchmark(name.c_str(), [&gpu, prepare = std::move(prepare)](benchmark::State& state) {
    measure(state, gpu, prepare);
  })->UseRealTime();
}

/// A kernel that moves so many bytes for each element.
void add_kernel(Gpu& gpu, const std::string& name, double bytes, std::function<void(Gpu&)> run) {
  add(gpu, name, [bytes, run = std::move(run)](Gpu& g) {
    return Work{.bytes = bytes * static_cast<double>(g.sizes().elements), .run = [&g, run] { run(g); }};
  });
}

// -- copies --------------------------------------------------------------------------------------------------------

void add_copies(Gpu& gpu) {
  add_kernel(gpu, "copy/device_to_device", 4, [](Gpu& g) {
    g.device().copy(g.slot<bf16>(1), g.slot<bf16>(0), g.slot_bytes(), CopyKind::device_to_device, g.stream());
  });
  add_kernel(gpu, "copy/host_to_device", 2, [](Gpu& g) {
    g.device().copy(g.slot<bf16>(1), g.host(), g.slot_bytes(), CopyKind::host_to_device, g.stream());
  });
  add_kernel(gpu, "copy/device_to_host", 2, [](Gpu& g) {
    g.device().copy(g.host(), g.slot<bf16>(0), g.slot_bytes(), CopyKind::device_to_host, g.stream());
  });
}

// -- the optimizer -------------------------------------------------------------------------------------------------

void add_update(Gpu& gpu, const std::string& name, StateFormat format) {
  add(gpu, "kernel/" + name, [format](Gpu& g) {
    const std::int64_t count = g.sizes().elements;
    const AdamPiece piece{
        {g.slot<void*>(0), g.slot<void*>(2), g.slot<void*>(4)}, g.slot<bf16>(6), g.slot<bf16>(7), count, format, 0};
    // Moments of random bytes would leave NaNs in some blocks, and stay so.
    if (format == StateFormat::byte_moments) {
      g.device().fill_zero(piece.state.m, m_bytes(format, count), g.stream());
      g.device().fill_zero(piece.state.v, v_bytes(format, count), g.stream());
    }
    return Work{.bytes = update_bytes_each(format) * static_cast<double>(count), .run = [&g, piece] {
                  g.ops().adamw(piece, numerics::adam_coefficients({}, 1, 1e-6, 1.0, true), g.stream());
                }};
  });
}

void add_optimizer(Gpu& gpu) {
  add_update(gpu, "adamw_fp32", StateFormat::fp32);
  add_update(gpu, "adamw_split", StateFormat::split);
  add_update(gpu, "adamw_bf16_moments", StateFormat::bf16_moments);
  add_update(gpu, "adamw_8bit_moments", StateFormat::byte_moments);
  add_update(gpu, "lion", StateFormat::lion);
  add_kernel(gpu, "kernel/accumulate", 10, [](Gpu& g) {
    g.ops().accumulate(g.slot<float>(0), g.slot<bf16>(6), false, g.sizes().elements, g.stream());
  });
  add_kernel(gpu, "kernel/round", 6,
             [](Gpu& g) { g.ops().round(g.slot<float>(0), g.slot<bf16>(6), g.sizes().elements, g.stream()); });
  add_kernel(gpu, "kernel/weights_of_master", 6, [](Gpu& g) {
    g.ops().weights_of_master(g.slot<float>(0), g.slot<bf16>(6), g.sizes().elements, g.stream());
  });
  add_kernel(gpu, "kernel/norm_blocks", 2,
             [](Gpu& g) { g.ops().norm_blocks(g.slot<bf16>(0), g.sizes().elements, g.slot<double>(6), g.stream()); });
}

// -- forward and backward ------------------------------------------------------------------------------------------

/// Vectors as long as a row or a column, in the last slots.
TensorView per_channel(Gpu& g, int slot, DType dtype) { return {g.slot<void*>(slot), dtype, {g.sizes().channels}}; }
TensorView per_row(Gpu& g, int slot) { return {g.slot<void*>(slot), DType::f32, {g.sizes().rows()}}; }

void add_norms(Gpu& gpu) {
  add_kernel(gpu, "kernel/rms_norm", 4, [](Gpu& g) {
    g.ops().rms_norm(g.rows(0), per_channel(g, 4, DType::bf16), g.rows(1), per_row(g, 5), eps, g.stream());
  });
  add_kernel(gpu, "kernel/rms_norm_backward", 6, [](Gpu& g) {
    g.ops().rms_norm_backward(g.rows(0), g.rows(1), per_channel(g, 4, DType::bf16), per_row(g, 5), g.rows(2), false,
                              per_channel(g, 6, DType::f32), g.stream());
  });
  add_kernel(gpu, "kernel/layer_norm", 4, [](Gpu& g) {
    const TensorView weight = per_channel(g, 4, DType::bf16);
    g.ops().layer_norm(g.rows(0), weight, weight, g.rows(1), per_row(g, 5), per_row(g, 6), eps, g.stream());
  });
  add_kernel(gpu, "kernel/layer_norm_backward", 6, [](Gpu& g) {
    g.ops().layer_norm_backward(g.rows(0), g.rows(1), per_channel(g, 4, DType::bf16), per_row(g, 5), per_row(g, 5),
                                g.rows(2), false, per_channel(g, 6, DType::f32), per_channel(g, 7, DType::f32),
                                g.stream());
  });
}

void add_pointwise(Gpu& gpu) {
  add_kernel(gpu, "kernel/swiglu", 6, [](Gpu& g) { g.ops().swiglu(g.rows(0), g.rows(1), g.rows(2), g.stream()); });
  add_kernel(gpu, "kernel/swiglu_backward", 10, [](Gpu& g) {
    g.ops().swiglu_backward(g.rows(0), g.rows(1), g.rows(2), g.rows(3), g.rows(4), g.stream());
  });
  add_kernel(gpu, "kernel/gelu", 4, [](Gpu& g) { g.ops().gelu(g.rows(0), g.rows(1), g.stream()); });
  add_kernel(gpu, "kernel/gelu_backward", 6,
             [](Gpu& g) { g.ops().gelu_backward(g.rows(0), g.rows(1), g.rows(2), g.stream()); });
  add_kernel(gpu, "kernel/add", 6, [](Gpu& g) { g.ops().add(g.rows(0), g.rows(1), g.rows(2), g.stream()); });
  add_kernel(gpu, "kernel/rope", 4, [](Gpu& g) {
    constexpr std::int64_t usual_sequence = 1024;
    const std::int64_t sequence = std::gcd(g.sizes().rows(), usual_sequence), dim = g.sizes().head_dim;
    const TensorView x{
        g.slot<bf16>(0), DType::bf16, {g.sizes().rows() / sequence, sequence, g.sizes().channels / dim, dim}};
    const TensorView table{g.slot<float>(4), DType::f32, {sequence, dim / 2, 2}};
    g.ops().rope(x, table, {}, false, g.stream());
  });
}

/// The products of a linear layer, of 2 N I O operations each.
void add_products(Gpu& gpu) {
  for (const Product& p : gpu.sizes().products) {
    const double flop = 2.0 * static_cast<double>(p.tokens) * static_cast<double>(p.in) * static_cast<double>(p.out);
    struct Operands {
      TensorView x, w, y, dw, residual;
    };
    const auto take = [p](Gpu& g) {
      Gpu::Taker taker(g);
      return Operands{taker.take({p.tokens, p.in}, DType::bf16), taker.take({p.out, p.in}, DType::bf16),
                      taker.take({p.tokens, p.out}, DType::bf16), taker.take({p.out, p.in}, DType::bf16),
                      taker.take({p.tokens, p.out}, DType::bf16)};
    };
    add(gpu, "product/forward/" + p.name, [take, flop](Gpu& g) {
      return Work{.flop = flop, .run = [&g, o = take(g)] { g.ops().linear(o.x, o.w, {}, o.y, g.stream()); }};
    });
    add(gpu, "product/forward_add/" + p.name, [take, flop](Gpu& g) {
      return Work{.flop = flop,
                  .run = [&g, o = take(g)] { g.ops().linear_add(o.x, o.w, {}, o.residual, o.y, g.stream()); }};
    });
    add(gpu, "product/backward_input/" + p.name, [take, flop](Gpu& g) {
      return Work{.flop = flop,
                  .run = [&g, o = take(g)] { g.ops().linear_backward_input(o.y, o.w, o.x, false, g.stream()); }};
    });
    add(gpu, "product/backward_weight/" + p.name, [take, flop](Gpu& g) {
      return Work{.flop = flop,
                  .run = [&g, o = take(g)] { g.ops().linear_backward_weight(o.y, o.x, o.dw, {}, g.stream()); }};
    });
  }
}

// -- experts -------------------------------------------------------------------------------------------------------

struct ExpertOperands {
  Routing routing;
  TensorView x, y, w, gate, up, act, dx, dw;  ///< x and y of tokens, the others but weights of rows
};

/// Operands of experts, with tokens routed by logits as they come: to some experts more than to others.
ExpertOperands take_experts(Gpu& g) {
  const Experts& s = g.sizes().experts;
  Gpu::Taker taker(g);
  const TensorView logits = taker.take({s.tokens, s.experts}, DType::f32);
  const auto slots = [&](DType dtype) { return taker.take({s.tokens, s.choices}, dtype); };
  const auto values = [&](std::int64_t count, std::int64_t width) { return taker.take({count, width}, DType::bf16); };
  ExpertOperands o;
  o.routing = {slots(DType::i32), slots(DType::f32), taker.take({s.experts + 1}, DType::i32),
               taker.take({s.rows()}, DType::i32), slots(DType::i32)};
  for (TensorView* of_tokens : {&o.x, &o.y}) *of_tokens = values(s.tokens, s.channels);
  for (TensorView* of_rows : {&o.gate, &o.up, &o.act}) *of_rows = values(s.rows(), s.inner);
  for (TensorView* weight : {&o.w, &o.dw}) *weight = taker.take({s.experts, s.inner, s.channels}, DType::bf16);
  o.dx = values(s.rows(), s.channels);
  g.ops().route(logits, true, o.routing, g.stream());
  return o;
}

/// The products of a layer of experts, of 2 N K I O operations each, and what memory bounds beside them.
void add_experts(Gpu& gpu) {
  const Experts& s = gpu.sizes().experts;
  const double flop = 2.0 * static_cast<double>(s.rows() * s.channels) * static_cast<double>(s.inner);
  const auto add_product = [&](const std::string& name, const auto& run) {
    add(gpu, "experts/" + name + "/" + s.name,
        [run, flop](Gpu& g) { return Work{.flop = flop, .run = [&g, run, o = take_experts(g)] { run(g, o); }}; });
  };
  add_product("forward", [](Gpu& g, const ExpertOperands& o) {
    g.ops().expert_linear({o.x, true}, o.w, o.routing, o.gate, g.stream());
  });
  add_product("backward_input", [](Gpu& g, const ExpertOperands& o) {
    g.ops().expert_backward_input({o.gate, false}, o.w, o.routing, o.dx, false, g.stream());
  });
  add_product("backward_weight", [](Gpu& g, const ExpertOperands& o) {
    g.ops().expert_backward_weight({o.gate, false}, {o.x, true}, o.routing, o.dw, g.stream());
  });
  const auto add_rows = [&](const std::string& name, std::int64_t elements, const auto& run) {
    add(gpu, "kernel/" + name, [run, elements](Gpu& g) {
      return Work{.bytes = static_cast<double>(elements) * sizeof(bf16),
                  .run = [&g, run, o = take_experts(g)] { run(g, o); }};
    });
  };
  add_rows("expert_swiglu", 3 * s.rows() * s.inner,
           [](Gpu& g, const ExpertOperands& o) { g.ops().expert_swiglu(o.gate, o.up, o.routing, o.act, g.stream()); });
  add_rows("expert_swiglu_backward", 5 * s.rows() * s.inner, [](Gpu& g, const ExpertOperands& o) {
    const TensorView drouting_weights{o.y.data, DType::f32, o.routing.weights.shape};
    g.ops().expert_swiglu_backward(o.act, o.gate, o.up, o.routing, o.gate, o.up, drouting_weights, g.stream());
  });
  add_rows("sum_rows", (s.rows() + 2 * s.tokens) * s.channels,
           [](Gpu& g, const ExpertOperands& o) { g.ops().sum_rows(o.dx, o.routing, o.x, o.y, g.stream()); });
}

/// FLOP of the lower triangle alone, as the literature counts: two products of (T, T) with each head forward, five
/// backward.
double attention_flop(const AttentionShape& s, bool backward) {
  return (backward ? 5.0 : 2.0) * static_cast<double>(s.batch * s.heads * s.head_dim) *
         static_cast<double>(s.sequence * s.sequence);
}

/// Beginnings and ends of records in rows that are full of them, (B, T) each: lengths drawn log-normally, median 180,
/// sigma 0.8, the last of a row cut at its end.
struct Records {
  explicit Records(const AttentionShape& shape) {
    std::mt19937_64 random(1);
    std::lognormal_distribution<double> lengths(std::log(180.0), 0.8);
    for (std::int64_t b = 0; b < shape.batch; ++b) {
      for (std::int64_t at = 0; at < shape.sequence;) {
        const auto drawn = std::max<std::int64_t>(2, static_cast<std::int64_t>(lengths(random)));
        const std::int64_t length = std::min(drawn, shape.sequence - at);
        first.insert(first.end(), static_cast<std::size_t>(length), static_cast<std::int32_t>(at));
        at += length;
        end.insert(end.end(), static_cast<std::size_t>(length), static_cast<std::int32_t>(at));
        squares += static_cast<double>(length * length);
      }
    }
  }
  std::vector<std::int32_t> first, end;
  double squares = 0.0;  ///< sum of the squared lengths
};

/// The call's shape with these records on the device.
AttentionShape with_records(Gpu& g, Gpu::Taker& taker, AttentionShape shape, const Records& records) {
  const auto put = [&](const std::vector<std::int32_t>& values) {
    const TensorView there = taker.take({shape.batch, shape.sequence}, DType::i32);
    g.device().copy(there.data, values.data(), there.bytes(), CopyKind::host_to_device, g.stream());
    g.device().synchronize(g.stream());
    return there.as<std::int32_t>();
  };
  shape.records.first = put(records.first);
  shape.records.end = put(records.end);
  return shape;
}

struct AttentionOperands {
  AttentionShape shape;
  TensorView q, k, v, out, lse, dout, dq, dk, dv;

  static HeadsView heads(const TensorView& t) { return {t.data, t.dtype, t.shape[2]}; }
  void forward(Gpu& g) const { g.ops().attention(heads(q), heads(k), heads(v), out, lse, shape, g.stream()); }
  void backward(Gpu& g) const {
    g.ops().attention_backward(dout, heads(q), heads(k), heads(v), out, lse, heads(dq), heads(dk), heads(dv), shape,
                               g.stream());
  }
};

AttentionOperands take_attention(Gpu::Taker& taker, const AttentionShape& shape) {
  const std::int64_t width = shape.heads * shape.head_dim, narrow = shape.kv_heads * shape.head_dim;
  const auto tokens = [&](std::int64_t w) { return taker.take({shape.batch, shape.sequence, w}, DType::bf16); };
  AttentionOperands o;
  o.shape = shape;
  for (TensorView* of_queries : {&o.q, &o.out, &o.dout, &o.dq}) *of_queries = tokens(width);
  for (TensorView* of_keys : {&o.k, &o.v, &o.dk, &o.dv}) *of_keys = tokens(narrow);
  o.lse = taker.take({shape.batch, shape.heads, shape.sequence}, DType::f32);
  return o;
}

void add_attention(Gpu& gpu) {
  for (const auto& [name, shape] : gpu.sizes().heads) {
    const auto take = [shape = shape](Gpu& g) {
      Gpu::Taker taker(g);
      return take_attention(taker, shape);
    };
    add(gpu, "attention/forward/" + name, [take, flop = attention_flop(shape, false)](Gpu& g) {
      return Work{.flop = flop, .run = [&g, o = take(g)] { o.forward(g); }};
    });
    add(gpu, "attention/backward/" + name, [take, flop = attention_flop(shape, true)](Gpu& g) {
      const AttentionOperands o = take(g);
      o.forward(g);
      return Work{.flop = flop, .run = [&g, o] { o.backward(g); }};
    });
  }
}

void add_packed_attention(Gpu& gpu) {
  for (const auto& [name, shape] : gpu.sizes().heads) {
    if (shape.window != 0) continue;
    const Records records(shape);
    const double share = records.squares / static_cast<double>(shape.batch * shape.sequence * shape.sequence);
    const auto take = [shape = shape, records](Gpu& g) {
      Gpu::Taker taker(g);
      AttentionOperands o = take_attention(taker, shape);
      o.shape = with_records(g, taker, shape, records);
      return o;
    };
    add(gpu, "attention/packed_forward/" + name, [take, flop = attention_flop(shape, false) * share](Gpu& g) {
      return Work{.flop = flop, .run = [&g, o = take(g)] { o.forward(g); }};
    });
    add(gpu, "attention/packed_backward/" + name, [take, flop = attention_flop(shape, true) * share](Gpu& g) {
      const AttentionOperands o = take(g);
      o.forward(g);
      return Work{.flop = flop, .run = [&g, o] { o.backward(g); }};
    });
  }
}

void add_head_loss(Gpu& gpu) {
  const Product& p = gpu.sizes().head;
  // Logits, and the two products of their gradients.
  const double flop = 6.0 * static_cast<double>(p.tokens) * static_cast<double>(p.in) * static_cast<double>(p.out);
  add(gpu, "head_loss/" + p.name, [p, flop](Gpu& g) {
    Gpu::Taker taker(g);
    HeadLoss head{.x = taker.take({p.tokens, p.in}, DType::bf16),
                  .weight = taker.take({p.out, p.in}, DType::bf16),
                  .targets = taker.take({p.tokens}, DType::i32),
                  .losses = taker.take({p.tokens}, DType::f32),
                  .gradient_scale = 1.0F / static_cast<float>(p.tokens),
                  .dx = taker.take({p.tokens, p.in}, DType::bf16),
                  .dweight = taker.take({p.out, p.in}, DType::f32)};
    std::vector<std::int32_t> targets(static_cast<std::size_t>(p.tokens));
    for (std::size_t i = 0; i < targets.size(); ++i) {
      constexpr std::size_t apart = 97;
      targets[i] = static_cast<std::int32_t>(i * apart % static_cast<std::size_t>(p.out));
    }
    g.device().copy(head.targets.data, targets.data(), head.targets.bytes(), CopyKind::host_to_device, g.stream());
    g.device().synchronize(g.stream());
    return Work{.flop = flop, .run = [&g, head] { g.ops().head_loss(head, g.stream()); }};
  });
}

/// Loss of pairs of sequences, with as many tokens as the other kernels have elements.
void add_preference_loss(Gpu& gpu) {
  add_kernel(gpu, "kernel/preference_loss", 4, [](Gpu& g) {
    constexpr std::int64_t usual_sequence = 1024;
    const std::int64_t of_half = g.sizes().elements / 2, sequence = std::gcd(of_half, usual_sequence);
    const std::int64_t pairs = of_half / sequence;
    g.ops().preference_loss({.losses = {g.slot<float>(0), DType::f32, {2 * pairs, sequence}},
                             .reference = {g.slot<float>(2), DType::f32, {2 * pairs}},
                             .sequence_factors = {g.slot<float>(4), DType::f32, {2 * pairs}},
                             .pairs = {g.slot<float>(6), DType::f32, {pairs, 3}}},
                            g.stream());
  });
}

int run(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  const bool small = argc == 2 && std::string_view(argv[1]) == "--small";
  if (argc > 1 && !small) {
    std::fprintf(stderr, "bench_gpu: unknown argument %s\n", argv[1]);
    return static_cast<int>(ExitCode::usage);
  }
  try {
    Gpu gpu(small ? small_sizes() : full_sizes());
    benchmark::AddCustomContext("device", gpu.device().info().name);
    benchmark::AddCustomContext("compute_key", gpu.device().info().compute_key);
    for (const auto add_some : {add_copies, add_optimizer, add_norms, add_pointwise, add_products, add_experts,
                                add_attention, add_packed_attention, add_head_loss, add_preference_loss}) {
      add_some(gpu);
    }
    benchmark::RunSpecifiedBenchmarks();
  } catch (const Error& error) {
    std::fprintf(stderr, "bench_gpu: %s\n", error.what());
    return static_cast<int>(error.exit_code());
  }
  return 0;
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) { return tandem::run(argc, argv); }
