// Every barrier of our kernels is needed, and a missing one shows: each is dropped in turn, and the results compared
// with those of the whole kernel. The last one before a kernel ends may protect nothing; none other may be idle.
// Under ThreadSanitizer the kernels run whole, and it sees what no barrier orders: also what gives the right bits, as
// threads on fibers, and lanes of a warp, keep more order than is promised.
#include <gmock/gmock.h>

#include <cmath>
#include <cstdlib>

#include "gpu_ops/base/kernels.hpp"
#include "gpu_ops/base/scratch.hpp"
#include "gpu_ops/emulation/grid.hpp"
#include "tests/gpu_ops/kernels/bench.hpp"

namespace tandem::testing {
namespace {

constexpr int seeds = 8;

using Idle = std::vector<std::int64_t>;

/// Barriers are dropped where that is no race to be told of.
#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define TANDEM_RACES_ARE_TOLD
#endif
#endif
#if defined(TANDEM_RACES_ARE_TOLD)
constexpr bool drops_barriers = false;
#else
constexpr bool drops_barriers = true;
#endif

/// Matches just these idle barriers, where barriers are dropped at all.
::testing::Matcher<Idle> only(const Idle& expected) {
  if (drops_barriers) return ::testing::ElementsAreArray(expected);
  return ::testing::IsEmpty();
}

/// The bytes that a run leaves, or "" where the emulation refused it.
using Outcome = std::vector<std::vector<std::uint8_t>>;

template <class Run>
Outcome outcome_of(const Run& run) {
  Outcome outcome;
  try {
    for (const Tensor& result : run()) outcome.push_back(result.bytes());
  } catch (const MisuseError&) {
    outcome.clear();  // dropping has made threads part ways, and the emulation says so
  }
  return outcome;
}

/// Barriers of `run` whose absence no seed shows.
template <class Run>
Idle idle_barriers(const Run& run) {
  emulation::set_schedule({});
  const Outcome whole = outcome_of(run);
  const std::int64_t count = emulation::barriers_passed();
  EXPECT_GT(count, 0);
  Idle idle;
  for (std::int64_t dropped = 0; drops_barriers && dropped < count; ++dropped) {
    bool shown = false;
    for (int seed = 1; seed <= seeds && !shown; ++seed) {
      emulation::set_schedule({.seed = static_cast<std::uint64_t>(seed), .dropped_barrier = dropped});
      shown = outcome_of(run) != whole;
    }
    if (!shown) idle.push_back(dropped);
  }
  emulation::set_schedule({});
  if (!idle.empty()) {
    std::string text;
    for (const std::int64_t i : idle) text += ' ' + std::to_string(i);
    std::cout << idle.size() << " of " << count << " barriers idle:" << text << '\n';
  }
  return idle;
}

class Barriers : public ::testing::Test {
 protected:
  Ops& ops() { return bench().ops(); }
  Operand zeros(DType dtype, Shape shape) { return bench().put(Tensor(dtype, shape)); }
  Random random_{21};
};

TEST_F(Barriers, OfTheNorms) {
  const Shape shape{1, 5000};  // so long that a block shares it
  const Tensor x = random_.tensor(DType::bf16, shape), w = random_.tensor(DType::bf16, {5000});
  const auto idle = idle_barriers([&] {
    const Operand in = bench().put(x), weight = bench().put(w), y = zeros(DType::bf16, shape);
    const Operand mean = zeros(DType::f32, {1}), rstd = zeros(DType::f32, {1});
    ops().layer_norm(in, weight, weight, y, mean, rstd, 1e-5F, {});
    return std::vector<Tensor>{bench().get(y), bench().get(mean), bench().get(rstd)};
  });
  EXPECT_THAT(idle, only({}));
}

#if defined(TANDEM_RACES_ARE_TOLD)
TEST_F(Barriers, ADroppedOneIsARace) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto norm_without = [&](std::int64_t dropped) {
    const Operand x = bench().put(random_.tensor(DType::f32, {1, 4000})), y = zeros(DType::f32, {1, 4000});
    const Operand weight = bench().put(random_.tensor(DType::bf16, {4000})), rstd = zeros(DType::f32, {1});
    emulation::set_schedule({.dropped_barrier = dropped});
    ops().rms_norm(x, {weight, 0.0F}, y, rstd, 1e-5F, {});
    std::exit(0);
  };
  EXPECT_EXIT(norm_without(emulation::no_barrier), ::testing::ExitedWithCode(0), "");
  EXPECT_EXIT(norm_without(0), ::testing::ExitedWithCode(66), "data race.*block_sums");
}
#endif

TEST_F(Barriers, OfMagnitudes) {
  const Shape shape{1, 8 * 256};  // a block of eight warps, which finds two
  const Tensor x = random_.tensor(DType::bf16, shape), d = random_.tensor(DType::bf16, shape);
  const auto floats = static_cast<std::int64_t>(ops().magnitude_bytes() / sizeof(float));
  const auto idle = idle_barriers([&] {
    const Operand gate = bench().put(x), dy = bench().put(d), dgate = zeros(DType::bf16, shape);
    const Operand of_gate = zeros(DType::f32, {floats}), of_up = zeros(DType::f32, {floats});
    ops().swiglu_backward(dy, gate, gate, MeasuredView(dgate, of_gate.view().data),
                          MeasuredView(gate, of_up.view().data), {});
    return std::vector<Tensor>{bench().get(of_gate), bench().get(of_up)};
  });
  EXPECT_THAT(idle, only({}));
}

TEST_F(Barriers, OfTheNormsBackward) {
  const Shape shape{1, 1000};
  const Tensor x = random_.tensor(DType::bf16, shape), w = random_.tensor(DType::bf16, {1000});
  const Tensor dy = random_.tensor(DType::bf16, shape), one = random_.tensor(DType::f32, {1});
  bench().lend({.tokens = 1, .channels = 1000, .activations = DType::bf16});
  const auto idle = idle_barriers([&] {
    const Operand in = bench().put(x), weight = bench().put(w), d = bench().put(dy), s = bench().put(one);
    const Operand dx = zeros(DType::bf16, shape);
    ops().layer_norm_backward(d, in, weight, s, s, dx, false, {}, {}, {});
    return std::vector<Tensor>{bench().get(dx)};
  });
  EXPECT_THAT(idle, only({}));
}

TEST_F(Barriers, OfTheSumsInTheNormsBackward) {
  const Shape shape{8, 24};  // one block of eight warps, which writes two sums one after the other
  const Tensor x = random_.tensor(DType::f32, shape), dy = random_.tensor(DType::f32, shape);
  const Tensor rows = random_.tensor(DType::f32, {8}), w = random_.tensor(DType::bf16, {24});
  bench().lend({.tokens = 8, .channels = 24, .activations = DType::f32});
  const auto idle = idle_barriers([&] {
    const Operand in = bench().put(x), weight = bench().put(w), d = bench().put(dy), s = bench().put(rows);
    const Operand dx = zeros(DType::f32, shape), dw = zeros(DType::f32, {24}), db = zeros(DType::f32, {24});
    ops().layer_norm_backward(d, in, weight, s, s, dx, false, dw, db, {});
    return std::vector<Tensor>{bench().get(dw), bench().get(db)};
  });
  EXPECT_THAT(idle, only({3}));
}

TEST_F(Barriers, OfCachedAttention) {
  const AttentionShape shape{1, 1, 1, 1, 24, 0.2F};
  const Tensor q = random_.tensor(DType::f32, {1, 24}), keys = random_.tensor(DType::f32, {1, 20, 24});
  Tensor places(DType::i32, {2});
  places.view().as<std::int32_t>()[1] = -19;  // the last of the positions of row 0
  const auto idle = idle_barriers([&] {
    const Operand query = bench().put(q), cache = bench().put(keys), at = bench().put(places);
    const Operand out = zeros(DType::f32, {1, 24});
    const auto* const place = at.as<std::int32_t>();
    ops().cached_attention(query.heads(24), {cache, cache}, {place, {place + 1, place + 1}}, out, shape, {});
    return std::vector<Tensor>{bench().get(out)};
  });
  EXPECT_THAT(idle, only({}));
}

TEST_F(Barriers, OfTheColumnSums) {
  const Shape shape{40, 24};  // one block, which writes two sums one after the other
  const Tensor x = random_.tensor(DType::f32, shape), dy = random_.tensor(DType::f32, shape);
  const Tensor rows = random_.tensor(DType::f32, {40});
  const auto scratch = static_cast<std::int64_t>(gpu::column_sums_scratch(24) / sizeof(float));
  const auto idle = idle_barriers([&] {
    const Operand in = bench().put(x), d = bench().put(dy), s = bench().put(rows);
    const Operand dw = zeros(DType::f32, {24}), db = zeros(DType::f32, {24}), parts = zeros(DType::f32, {scratch});
    gpu::add_norm_column_sums({.dy = d, .x = in, .mean = s, .rstd = s, .dweight = dw, .dbias = db}, parts.as<float>(),
                              nullptr);
    return std::vector<Tensor>{bench().get(dw), bench().get(db)};
  });
  EXPECT_THAT(idle, only({3}));
}

TEST_F(Barriers, OfTheNormBlocks) {
  const Tensor gradient = random_.tensor(DType::bf16, {layout_quantum});
  const auto idle = idle_barriers([&] {
    const Operand g = bench().put(gradient), partial = zeros(DType::f32, {2});
    ops().norm_blocks(g.as<bf16>(), layout_quantum, reinterpret_cast<double*>(partial.as<float>()), {});
    return std::vector<Tensor>{bench().get(partial)};
  });
  EXPECT_THAT(idle, only({1}));
}

TEST_F(Barriers, OfTheLoss) {
  const std::int64_t vocabulary = 300;
  const Tensor x = random_.tensor(DType::f32, {1, 8}), w = random_.tensor(DType::bf16, {vocabulary, 8});
  const Tensor target(DType::i32, {1});
  bench().lend({.tokens = 1, .vocabulary = vocabulary, .channels = 8, .activations = DType::f32});
  const auto idle = idle_barriers([&] {
    const Operand in = bench().put(x), weight = bench().put(w), t = bench().put(target), dx = zeros(DType::f32, {1, 8});
    const Operand losses = zeros(DType::f32, {1});
    ops().head_loss({in, weight, t, losses, 1.0F, dx, {}}, {});
    return std::vector<Tensor>{bench().get(losses), bench().get(dx)};
  });
  EXPECT_THAT(idle, only({37}));  // barrier of the product over the vocabulary
}

TEST_F(Barriers, OfThePreferenceLoss) {
  const Tensor losses = random_.tensor(DType::f32, {2, 300});
  const auto idle = idle_barriers([&] {
    const Operand l = bench().put(losses), reference = zeros(DType::f32, {2}), factors = zeros(DType::f32, {2});
    const Operand pairs = zeros(DType::f32, {1, 3});
    ops().preference_loss({l, reference, 0.1F, factors, pairs}, {});
    return std::vector<Tensor>{bench().get(factors), bench().get(pairs)};
  });
  EXPECT_THAT(idle, only({}));
}

TEST_F(Barriers, OfTheEmbeddingGradient) {
  const std::int64_t tokens = 600;  // three searches of a block
  // Without a barrier a block takes what happens to lie in shared memory for rows, up to a block of threads behind
  // those it was given.
  const std::int64_t readable = tokens + 600;
  const Tensor ids = random_.tokens({tokens}, 3), dout = random_.tensor(DType::f32, {readable, 24});
  for (const DType type : {DType::f32, DType::bf16}) {  // added to, and written whole
    const auto idle = idle_barriers([&] {
      const Operand i = bench().put(ids), d = bench().put(dout), dtable = zeros(type, {3, 24});
      ops().embedding_backward(d.view().rows(0, tokens), i, tokens, dtable, {}, {}, {});
      return std::vector<Tensor>{bench().get(dtable)};
    });
    EXPECT_THAT(idle, only({0})) << name_of(type);
  }
}

TEST_F(Barriers, OfTheMatrixProduct) {
  const Tensor x = random_.tensor(DType::f32, {64, 40}), w = random_.tensor(DType::bf16, {64, 40});
  bench().lend({.tokens = 64, .channels = 64, .activations = DType::f32});
  const auto idle = idle_barriers([&] {
    const Operand in = bench().put(x), weight = bench().put(w), y = zeros(DType::f32, {64, 64});
    ops().linear(in, weight, {}, y, {});
    return std::vector<Tensor>{bench().get(y)};
  });
  EXPECT_THAT(idle, only({5}));
}

/// A routing's memory on the device. Before the sorted slots there is room for what a block without its barriers takes
/// for rows.
struct Routed {
  Routed(std::int64_t tokens, std::int64_t of_experts)
      : experts(bench().put(Tensor(DType::i32, {tokens, 1}))),
        routing_weights(bench().put(Tensor(DType::f32, {tokens, 1}))),
        begins(bench().put(Tensor(DType::i32, {of_experts + 1}))),
        slots(bench().put(Tensor(DType::i32, {tokens}), 64)),
        rows(bench().put(Tensor(DType::i32, {tokens, 1}))) {}
  operator Routing() const { return {experts, routing_weights, begins, slots, rows}; }  // NOLINT: views of it are meant
  Operand experts, routing_weights, begins, slots, rows;
};

TEST_F(Barriers, OfTheSortedRows) {
  const std::int64_t tokens = 600, experts = 3;
  const Tensor logits = random_.tensor(DType::f32, {tokens, experts});
  const auto idle = idle_barriers([&] {
    const Operand l = bench().put(logits);
    const Routed r(tokens, experts);
    ops().route(l, false, r, {});
    return std::vector<Tensor>{bench().get(r.begins), bench().get(r.slots), bench().get(r.rows)};
  });
  EXPECT_THAT(idle, only({1}));
}

/// Barriers that are idle in the forward of experts, and in the gradient of their weights.
class ExpertBarriers : public Barriers {
 protected:
  /// Idle barriers of one tile: every warp has a part of it, and its rows are aligned, so that copies are not waited
  /// for.
  std::pair<Idle, Idle> idle_of(DType dtype, std::int64_t rows, std::int64_t out, std::int64_t channels) {
    const std::int64_t columns = out;
    const Tensor x = random_.tensor(dtype, {rows, channels}), w = random_.tensor(DType::bf16, {1, out, channels});
    const Tensor dy = random_.tensor(dtype, {channels, out}), in = random_.tensor(dtype, {channels, columns});
    Idle forward = idle_barriers([&] {
      const Operand a = bench().put(x), b = bench().put(w), y = zeros(dtype, {rows, out});
      ops().expert_linear({a, false}, b, to_one_expert(rows), y, {});
      return std::vector<Tensor>{bench().get(y)};
    });
    Idle of_weights = idle_barriers([&] {
      const Operand a = bench().put(dy), b = bench().put(in), dw = zeros(DType::f32, {1, out, columns});
      ops().expert_backward_weight({a, false}, {b, false}, to_one_expert(channels), dw, {});
      return std::vector<Tensor>{bench().get(dw)};
    });
    return {std::move(forward), std::move(of_weights)};
  }
  static Routed to_one_expert(std::int64_t tokens) {
    Routed r(tokens, 1);
    r.begins.as<std::int32_t>()[1] = static_cast<std::int32_t>(tokens);
    for (std::int64_t i = 0; i < tokens; ++i) {
      r.slots.as<std::int32_t>()[i] = r.rows.as<std::int32_t>()[i] = static_cast<std::int32_t>(i);
    }
    return r;
  }
};

TEST_F(ExpertBarriers, InFp32) {
  const auto [forward, of_weights] = idle_of(DType::f32, 64, 64, 40);
  EXPECT_THAT(forward, only({5}));
  EXPECT_THAT(of_weights, only({5}));
}

TEST_F(ExpertBarriers, OnTensorCores) {
  const auto [forward, of_weights] = idle_of(DType::bf16, 72, 72, 200);
  EXPECT_THAT(forward, only({11}));
  EXPECT_THAT(of_weights, only({11}));
}

/// Barriers that are idle in attention's forward, and in its backward.
class AttentionBarriers : public Barriers {
 protected:
  std::pair<Idle, Idle> idle_of(DType dtype, std::int64_t tokens, std::int64_t dim) {
    const AttentionShape s{1, tokens, 1, 1, dim, 1.0F / std::sqrt(static_cast<float>(dim))};
    const Shape shape{1, tokens, dim}, rows{1, 1, tokens};
    const Tensor q = random_.tensor(dtype, shape), k = random_.tensor(dtype, shape);
    const Tensor v = random_.tensor(dtype, shape), dout = random_.tensor(dtype, shape);
    bench().lend({.tokens = tokens, .sequence = tokens, .heads = 1, .head_dim = dim, .activations = dtype});
    Tensor out(dtype, shape), lse(DType::f32, rows);
    const auto forward = [&] {
      const Operand a = bench().put(q), b = bench().put(k), c = bench().put(v), o = zeros(dtype, shape);
      const Operand l = zeros(DType::f32, rows);
      ops().attention(a.heads(dim), b.heads(dim), c.heads(dim), o, l, s, {});
      out = bench().get(o);
      lse = bench().get(l);
      return std::vector<Tensor>{out, lse};
    };
    Idle in_forward = idle_barriers(forward);
    forward();
    Idle in_backward = idle_barriers([&] {
      const Operand a = bench().put(q), b = bench().put(k), c = bench().put(v), o = bench().put(out),
                    l = bench().put(lse);
      const Operand d = bench().put(dout), da = zeros(dtype, shape), db = zeros(dtype, shape);
      const Operand dc = zeros(dtype, shape);
      ops().attention_backward(d, a.heads(dim), b.heads(dim), c.heads(dim), o, l, da.heads(dim), db.heads(dim),
                               dc.heads(dim), s, {});
      return std::vector<Tensor>{bench().get(da), bench().get(db), bench().get(dc)};
    });
    return {std::move(in_forward), std::move(in_backward)};
  }
};

TEST_F(AttentionBarriers, InFp32) {
  const auto [forward, backward] = idle_of(DType::f32, 120, 16);
  EXPECT_THAT(forward, only({15}));
  EXPECT_THAT(backward, only({11}));
}

TEST_F(AttentionBarriers, OnTensorCores) {
  const auto [forward, backward] = idle_of(DType::bf16, 120, 16);
  EXPECT_THAT(forward, only({}));
  EXPECT_THAT(backward, only({}));
}

TEST_F(AttentionBarriers, OnTensorCoresOfWideHeads) {
  const auto [forward, backward] = idle_of(DType::bf16, 70, 130);
  EXPECT_THAT(forward, only({9})) << "out is written over queries that no other warp reads";
  EXPECT_THAT(backward, only({}));
}

}  // namespace
}  // namespace tandem::testing
