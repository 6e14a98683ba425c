// Mixtures of experts: who goes where, and linear layers of which each row has its expert's.
#include <algorithm>

#include "core/numerics/activation.hpp"
#include "core/numerics/routing.hpp"
#include "cpu_ops/kernels/elements.hpp"
#include "cpu_ops/kernels/kernels.hpp"
#include "cpu_ops/kernels/lane_sums.hpp"
#include "cpu_ops/kernels/product_tiles.hpp"

namespace tandem::fast {
namespace {

constexpr std::int64_t tokens_at_once = 16;

/// A routing's arrays and sizes.
struct Route {
  explicit Route(const Routing& r)
      : choices(r.experts.shape[1]),
        slots_count(r.experts.count()),
        expert_count(r.begins.shape[0] - 1),
        experts(r.experts.as<std::int32_t>()),
        weights(r.weights.as<float>()),
        begins(r.begins.as<std::int32_t>()),
        slots(r.slots.as<std::int32_t>()),
        rows(r.rows.as<std::int32_t>()) {}
  std::int64_t rows_of(std::int64_t expert) const { return begins[expert + 1] - begins[expert]; }

  std::int64_t choices, slots_count, expert_count;
  std::int32_t* experts;
  float* weights;
  std::int32_t* begins;
  std::int32_t* slots;
  std::int32_t* rows;
};

// -- the choice ----------------------------------------------------------------------------------------------------

/// The first `choices` of the experts in the order of their logits.
void choose(const float* logits, std::int64_t experts, std::int64_t choices, std::int32_t* chosen) {
  std::int64_t held = 0;
  for (std::int64_t e = 0; e < experts; ++e) {
    const auto precedes = [&](std::int64_t j) {
      return numerics::chosen_before(logits[e], e, logits[chosen[j]], chosen[j]);
    };
    if (held == choices && !precedes(held - 1)) continue;
    if (held < choices) ++held;
    std::int64_t at = held - 1;
    for (; at > 0 && precedes(at - 1); --at) chosen[at] = chosen[at - 1];
    chosen[at] = static_cast<std::int32_t>(e);
  }
}

/// Softmax of one token's logits: gives the probability of each.
struct Softmax {
  float largest, sum;
  float operator()(float logit) const { return numerics::div(numerics::exp(logit - largest), sum); }
};

/// Softmax over all logits of a token, or over those of the chosen experts alone, summed in their order.
Softmax softmax_of(const float* logits, std::int64_t experts, const std::int32_t* chosen, std::int64_t choices,
                   bool normalized) {
  const float largest = logits[chosen[0]];
  float sum = 0.0F;
  if (normalized) {
    for (std::int64_t j = 0; j < choices; ++j) sum += numerics::exp(logits[chosen[j]] - largest);
  } else {
    for (std::int64_t e = 0; e < experts; ++e) sum += numerics::exp(logits[e] - largest);
  }
  return {largest, sum};
}

/// Sorts slots by expert, those of one expert in their order.
void sort_slots(const Route& r) {
  std::fill_n(r.begins, r.expert_count + 1, 0);
  for (std::int64_t slot = 0; slot < r.slots_count; ++slot) ++r.begins[r.experts[slot] + 1];
  for (std::int64_t e = 0; e < r.expert_count; ++e) r.begins[e + 1] += r.begins[e];
  for (std::int64_t slot = 0; slot < r.slots_count; ++slot) {
    const std::int32_t row = r.begins[r.experts[slot]]++;  // until all are placed, where the expert's next row is
    r.slots[row] = static_cast<std::int32_t>(slot);
    r.rows[slot] = row;
  }
  std::copy_backward(r.begins, r.begins + r.expert_count, r.begins + r.expert_count + 1);
  r.begins[0] = 0;
}

// -- products ------------------------------------------------------------------------------------------------------

/// The rows of all experts in blocks, each of one expert.
class ExpertBlocks {
 public:
  explicit ExpertBlocks(const Route& route) : route_(route) {
    for (std::int64_t e = 0; e < route.expert_count; ++e) count_ += blocks_of(e);
  }
  std::int64_t count() const { return count_; }
  struct Block {
    std::int64_t expert;
    Range rows;
  };
  Block at(std::int64_t i) const {
    std::int64_t e = 0;
    for (; i >= blocks_of(e); ++e) i -= blocks_of(e);
    const Range within = range_of(row_blocks(route_.rows_of(e)), i);
    return {e, {route_.begins[e] + within.begin, within.length}};
  }

 private:
  std::int64_t blocks_of(std::int64_t e) const {
    return route_.rows_of(e) == 0 ? 0 : row_blocks(route_.rows_of(e)).count;
  }
  const Route& route_;
  std::int64_t count_ = 0;
};

/// Most rows in a block: a token chooses an expert once.
std::int64_t block_rows(const Route& r) { return std::min(most_rows, r.slots_count / r.choices); }

template <class T>
Rows<T> rows_of(const RowValues& x, const Route& r) {
  return {x.values.as<T>(), x.values.shape[1], x.of_tokens ? r.slots : nullptr, r.choices};
}

/// `with_weight(e)` is the product with the weight of expert e.
template <class WithWeight>
void make_tiles(Parallel& parallel, const Workspace& workspace, const Route& r, const WithWeight& with_weight) {
  if (r.slots_count == 0) return;
  const ExpertBlocks blocks(r);
  const auto any = with_weight(0);
  const TileRoom room = any.room(block_rows(r));
  for_tiles(parallel, blocks.count() * any.columns.count, workspace, room.bytes(),
            [&](std::int64_t tile, Scratch scratch) {
              const auto [expert, rows] = blocks.at(tile / any.columns.count);
              with_weight(expert).make_tile(rows, tile % any.columns.count, TileBuffers(scratch, room));
            });
}

template <class WithWeight>
void make_weights(Parallel& parallel, const Workspace& workspace, const Route& r, const WithWeight& with_weight) {
  const auto any = with_weight(0);
  const TileRoom room = any.room(block_rows(r));
  for_tiles(parallel, r.expert_count * any.tiles(), workspace, room.bytes(), [&](std::int64_t tile, Scratch scratch) {
    const std::int64_t e = tile / any.tiles();
    with_weight(e).make_tile(r.begins[e], Blocks(r.rows_of(e), most_summed_rows), tile % any.tiles(),
                             TileBuffers(scratch, room));
  });
}

}  // namespace

std::size_t expert_scratch(std::int64_t tokens, std::int64_t in, std::int64_t out, int threads) {
  return linear_scratch(tokens, in, out, DType::bf16, threads);  // rows of tokens are copied, whatever their type
}

void route(Parallel& parallel, TensorView logits, bool normalized, const Routing& routing) {
  const Route r(routing);
  const std::int64_t experts = r.expert_count, choices = r.choices;
  const float* const all = logits.as<float>();
  for_ranges(parallel, logits.shape[0], tokens_at_once, [&](std::int64_t begin, std::int64_t length) {
    for (std::int64_t n = begin; n < begin + length; ++n) {
      const float* const row = all + n * experts;
      std::int32_t* const chosen = r.experts + n * choices;
      choose(row, experts, choices, chosen);
      const Softmax share = softmax_of(row, experts, chosen, choices, normalized);
      for (std::int64_t j = 0; j < choices; ++j) r.weights[n * choices + j] = share(row[chosen[j]]);
    }
  });
  sort_slots(r);
}

void route_backward(Parallel& parallel, TensorView drouting_weights, TensorView logits, bool normalized,
                    const Routing& routing, TensorView dlogits) {
  const Route r(routing);
  const std::int64_t experts = r.expert_count, choices = r.choices;
  const float *const all = logits.as<float>(), *const gradients = drouting_weights.as<float>();
  with_activation(dlogits.dtype, [&]<class T>(T) {
    T* const to = dlogits.as<T>();
    for_ranges(parallel, logits.shape[0], tokens_at_once, [&](std::int64_t begin, std::int64_t length) {
      for (std::int64_t n = begin; n < begin + length; ++n) {
        const float *const row = all + n * experts, *const dshare = gradients + n * choices;
        const float* const weights = r.weights + n * choices;
        const std::int32_t* const chosen = r.experts + n * choices;
        float mean = 0.0F;
        for (std::int64_t j = 0; j < choices; ++j) mean = numerics::fma(weights[j], dshare[j], mean);
        const Softmax share = softmax_of(row, experts, chosen, choices, normalized);
        for (std::int64_t e = 0; e < experts; ++e) {
          const float probability = normalized ? 0.0F : share(row[e]);
          to[n * experts + e] = from_float<T>(numerics::logit_gradient(probability, 0.0F, mean));
        }
        for (std::int64_t j = 0; j < choices; ++j) {
          to[n * experts + chosen[j]] = from_float<T>(numerics::logit_gradient(weights[j], dshare[j], mean));
        }
      }
    });
  });
}

void expert_linear(Parallel& parallel, const Workspace& workspace, RowValues x, TensorView w, const Routing& routing,
                   TensorView y) {
  const Route r(routing);
  const std::int64_t out = w.shape[1], in = w.shape[2];
  with_activation(y.dtype, [&]<class T>(T) {
    make_tiles(parallel, workspace, r, [&](std::int64_t e) {
      return ForwardProduct<T, T>{rows_of<T>(x, r), w.as<bf16>() + e * out * in, nullptr, y.as<T>(), in, out};
    });
  });
}

void expert_backward_input(Parallel& parallel, const Workspace& workspace, RowValues dy, TensorView w,
                           const Routing& routing, TensorView dx, bool accumulate) {
  const Route r(routing);
  const std::int64_t out = w.shape[1], in = w.shape[2];
  with_activation(dx.dtype, [&]<class T>(T) {
    make_tiles(parallel, workspace, r, [&](std::int64_t e) {
      return InputProduct<T, T>{rows_of<T>(dy, r), w.as<bf16>() + e * out * in, dx.as<T>(), accumulate, in, out};
    });
  });
}

void expert_backward_weight(Parallel& parallel, const Workspace& workspace, RowValues dy, RowValues x,
                            const Routing& routing, TensorView dw) {
  const Route r(routing);
  const std::int64_t out = dw.shape[1], in = dw.shape[2];
  with_activation(dy.values.dtype, [&]<class T>(T) {
    with_activation(dw.dtype, [&]<class Dw>(Dw) {
      make_weights(parallel, workspace, r, [&](std::int64_t e) {
        return WeightProduct<T, T, Dw>{rows_of<T>(dy, r), rows_of<T>(x, r), dw.as<Dw>() + e * out * in, in, out};
      });
    });
  });
}

void expert_swiglu(Parallel& parallel, TensorView gate, TensorView up, const Routing& routing, TensorView y) {
  const Route r(routing);
  const std::int64_t channels = gate.shape[1];
  with_activation(gate.dtype, [&]<class T>(T) {
    const T *const g = gate.as<T>(), *const u = up.as<T>();
    T* const to = y.as<T>();
    for_ranges(parallel, r.slots_count, tokens_at_once, [=](std::int64_t begin, std::int64_t length) {
      for (std::int64_t row = begin; row < begin + length; ++row) {
        vectorised([=, share = r.weights[r.slots[row]]] {
#pragma GCC ivdep
          for (std::int64_t i = row * channels; i < (row + 1) * channels; ++i) {
            to[i] = from_float<T>(share * numerics::swiglu(to_float(g[i]), to_float(u[i])));
          }
        });
      }
    });
  });
}

void expert_swiglu_backward(Parallel& parallel, TensorView dy, TensorView gate, TensorView up, const Routing& routing,
                            TensorView dgate, TensorView dup, TensorView drouting_weights) {
  const Route r(routing);
  const std::int64_t channels = gate.shape[1];
  float* const dshare = drouting_weights.as<float>();
  with_activation(gate.dtype, [&]<class T>(T) {
    const T *const d = dy.as<T>(), *const g = gate.as<T>(), *const u = up.as<T>();
    T *const dg = dgate.as<T>(), *const du = dup.as<T>();
    for_ranges(parallel, r.slots_count, tokens_at_once, [=](std::int64_t begin, std::int64_t length) {
      for (std::int64_t row = begin; row < begin + length; ++row) {
        const std::int32_t slot = r.slots[row];
        const std::int64_t first = row * channels;
        vectorised([=, share = r.weights[slot]] {
          dshare[slot] = lane_sum(channels, [=](std::int64_t i) {
            return to_float(d[first + i]) * numerics::swiglu(to_float(g[first + i]), to_float(u[first + i]));
          });
#pragma GCC ivdep
          for (std::int64_t i = first; i < first + channels; ++i) {
            const float gradient = share * to_float(d[i]), x = to_float(g[i]), y = to_float(u[i]);
            dg[i] = from_float<T>(gradient * y * numerics::silu_derivative(x));
            du[i] = from_float<T>(gradient * numerics::silu(x));
          }
        });
      }
    });
  });
}

void sum_rows(Parallel& parallel, TensorView x, const Routing& routing, TensorView residual, TensorView y) {
  const Route r(routing);
  const std::int64_t channels = y.shape[1];
  with_activation(y.dtype, [&]<class T>(T) {
    const T *const from = x.as<T>(), *const before = optional<T>(residual);
    T* const to = y.as<T>();
    for_ranges(parallel, y.shape[0], tokens_at_once, [=](std::int64_t begin, std::int64_t length) {
      for (std::int64_t n = begin; n < begin + length; ++n) {
        vectorised([=, rows = r.rows + n * r.choices, choices = r.choices] {
#pragma GCC ivdep
          for (std::int64_t c = 0; c < channels; ++c) {
            float sum = to_float(from[rows[0] * channels + c]);
            for (std::int64_t j = 1; j < choices; ++j) sum += to_float(from[rows[j] * channels + c]);
            const std::int64_t at = n * channels + c;
            to[at] = from_float<T>(before == nullptr ? sum : to_float(before[at]) + sum);
          }
        });
      }
    });
  });
}

}  // namespace tandem::fast
