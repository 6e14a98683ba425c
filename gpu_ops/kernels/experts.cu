// Assignment of tokens to experts, and work on rows outside of the products: a warp for each token or row. Rows are
// sorted without atomics: a block for each expert looks through all slots for its own.
#include "core/numerics/activation.hpp"
#include "core/numerics/routing.hpp"
#include "gpu_ops/base/kernels.hpp"
#include "gpu_ops/base/launch.hpp"
#include "gpu_ops/kernels/block_sums.hpp"
#include "gpu_ops/kernels/elements.hpp"

namespace tandem::gpu {
namespace {

/// Calls body(row) for each of [0, rows) by all lanes of a warp, launched with warp_row_geometry().
template <class Body>
TANDEM_DEVICE void for_warp_rows(std::int64_t rows, const Body& body) {
  const std::int64_t stride = grid_size() * warp_row_warps;
  for (std::int64_t row = block_index() * warp_row_warps + thread_index() / warp_lanes; row < rows; row += stride) {
    body(row);
  }
}

/// Calls body(span) for a row of `count` elements, shared by the lanes of the warp.
template <class Body>
TANDEM_DEVICE void for_lane_spans(std::int64_t count, bool aligned, const Body& body) {
  for (std::int64_t at = own_lane() * packet; at < count; at += warp_lanes * packet) {
    body(span_at(at, count, aligned));
  }
}

/// A routing on the device, and its sizes.
struct Routes {
  std::int32_t* experts;
  float* weights;
  std::int32_t *begins, *slots, *rows;
  std::int64_t tokens, choices, count;  ///< count: of experts

  TANDEM_DEVICE std::int64_t slot_count() const { return tokens * choices; }
};

// -- the choice ----------------------------------------------------------------------------------------------------

struct Choice {
  float logit;
  std::int32_t expert;  ///< negative: none
};

TANDEM_DEVICE bool precedes(const Choice& a, const Choice& b) {
  if (a.expert < 0 || b.expert < 0) return a.expert >= 0;
  return numerics::chosen_before(a.logit, a.expert, b.logit, b.expert);
}

/// The expert that is chosen after `last`, or first after none, in every lane.
TANDEM_DEVICE Choice next_choice(const float* logits, std::int64_t experts, const Choice& last) {
  Choice best{0.0F, -1};
  for (std::int64_t e = own_lane(); e < experts; e += warp_lanes) {
    const Choice own{logits[e], static_cast<std::int32_t>(e)};
    if ((last.expert < 0 || precedes(last, own)) && precedes(own, best)) best = own;
  }
  for (int distance = warp_lanes / 2; distance > 0; distance /= 2) {
    const Choice other{shuffle_xor(best.logit, distance), shuffle_xor(best.expert, distance)};
    if (precedes(other, best)) best = other;
  }
  return best;
}

/// The sum of exp(logit - largest) over all logits of a token, in every lane.
TANDEM_DEVICE float sum_of_all(const float* logits, std::int64_t experts, float largest) {
  float sum = 0.0F;
  for (std::int64_t e = own_lane(); e < experts; e += warp_lanes) sum = sum + numerics::exp(logits[e] - largest);
  return warp_sum(sum);
}

/// Chooses the experts of each token. Only lane j % 32 writes and reads again the results of choice j.
TANDEM_KERNEL(warp_row_threads)
choose_kernel(const float* logits, Routes r, bool normalized) {
  for_warp_rows(r.tokens, [&](std::int64_t token) {
    const float* const row = logits + token * r.count;
    const std::int64_t first_slot = token * r.choices;
    Choice choice{0.0F, -1};
    float largest = 0.0F, sum = 0.0F;
    for (std::int64_t j = 0; j < r.choices; ++j) {
      choice = next_choice(row, r.count, choice);
      if (j == 0) largest = choice.logit;
      const float weight = numerics::exp(choice.logit - largest);
      sum = sum + weight;
      if (j % warp_lanes != own_lane()) continue;
      r.experts[first_slot + j] = choice.expert;
      r.weights[first_slot + j] = weight;
    }
    if (!normalized) sum = sum_of_all(row, r.count, largest);
    for (std::int64_t j = own_lane(); j < r.choices; j += warp_lanes) {
      r.weights[first_slot + j] = numerics::div(r.weights[first_slot + j], sum);
    }
  });
}

/// A lane has the same experts in both passes, so that its second store comes after its first.
template <class T>
TANDEM_KERNEL(warp_row_threads)
choose_backward_kernel(const float* drouting_weights, const float* logits, Routes r, T* dlogits, bool normalized) {
  for_warp_rows(r.tokens, [&](std::int64_t token) {
    const float *const row = logits + token * r.count, *const dshare = drouting_weights + token * r.choices;
    const float* const share = r.weights + token * r.choices;
    const std::int32_t* const chosen = r.experts + token * r.choices;
    T* const to = dlogits + token * r.count;
    float mean = 0.0F;
    for (std::int64_t j = 0; j < r.choices; ++j) mean = numerics::fma(share[j], dshare[j], mean);
    const float largest = row[chosen[0]], sum = normalized ? 1.0F : sum_of_all(row, r.count, largest);
    for (std::int64_t e = own_lane(); e < r.count; e += warp_lanes) {
      const float probability = normalized ? 0.0F : numerics::div(numerics::exp(row[e] - largest), sum);
      to[e] = from_float<T>(numerics::logit_gradient(probability, 0.0F, mean));
    }
    for (std::int64_t j = 0; j < r.choices; ++j) {
      if (chosen[j] % warp_lanes != own_lane()) continue;
      to[chosen[j]] = from_float<T>(numerics::logit_gradient(share[j], dshare[j], mean));
    }
  });
}

// -- rows sorted by expert -----------------------------------------------------------------------------------------

/// Calls body(slot, expert) for slots [begin, end) in their order, 32 at once by the lanes of the warp. Behind the end
/// lanes get the expert `none`.
template <class Body>
TANDEM_DEVICE void for_slots(const std::int32_t* experts, std::int64_t begin, std::int64_t end, std::int32_t none,
                             const Body& body) {
  constexpr int ahead = 8;  // reads that wait for memory together
  for (std::int64_t first = begin; first < end; first += ahead * warp_lanes) {
    std::int32_t of[ahead];
    TANDEM_UNROLL
    for (int i = 0; i < ahead; ++i) {
      const std::int64_t slot = first + i * warp_lanes + own_lane();
      of[i] = slot < end ? experts[slot] : none;
    }
    TANDEM_UNROLL
    for (int i = 0; i < ahead; ++i) body(first + i * warp_lanes + own_lane(), of[i]);
  }
}

/// Each warp has a part of the slots: it counts those of earlier experts and of its block's, and when it knows how many
/// of these come in earlier parts, places its own.
TANDEM_KERNEL(most_threads)
sort_rows_kernel(Routes r) {
  TANDEM_SHARED(std::int32_t, earlier, most_warps);
  TANDEM_SHARED(std::int32_t, own, most_warps);
  const int warp = thread_index() / warp_lanes;
  const std::int64_t part = ceil_div(ceil_div(r.slot_count(), most_warps), warp_lanes) * warp_lanes;
  const std::int64_t begin = warp * part;
  const std::int64_t end = begin + part < r.slot_count() ? begin + part : r.slot_count();
  const auto none = static_cast<std::int32_t>(r.count);
  for (std::int64_t i = block_index(); i < r.count; i += grid_size()) {
    const auto expert = static_cast<std::int32_t>(i);
    std::int32_t before = 0, found = 0;
    for_slots(r.experts, begin, end, none, [&](std::int64_t, std::int32_t e) {
      before += set_bits(ballot(e < expert));
      found += set_bits(ballot(e == expert));
    });
    if (own_lane() == 0) {
      earlier[warp] = before;
      own[warp] = found;
    }
    barrier();
    std::int32_t first = 0, row = 0;
    for (int w = 0; w < most_warps; ++w) {
      first += earlier[w];
      row += w < warp ? own[w] : 0;
    }
    barrier();
    row += first;
    if (thread_index() == 0) r.begins[i] = first;
    if (thread_index() == 0 && i == 0) r.begins[r.count] = static_cast<std::int32_t>(r.slot_count());
    for_slots(r.experts, begin, end, none, [&](std::int64_t slot, std::int32_t e) {
      const std::uint32_t all = ballot(e == expert);
      const std::int32_t at = row + set_bits(all & ((1u << own_lane()) - 1));
      row += set_bits(all);
      if (e != expert) return;
      r.slots[at] = static_cast<std::int32_t>(slot);
      r.rows[slot] = at;
    });
  }
}

// -- rows ----------------------------------------------------------------------------------------------------------

/// A thread for each span: `spans` are those of a row.
template <class T>
TANDEM_KERNEL(most_threads)
expert_swiglu_kernel(const T* gate, const T* up, Routes r, T* y, Divisor spans, std::uint32_t items,
                     std::int64_t channels, bool aligned) {
  for_items(items, [&](std::uint32_t i) {
    const std::uint32_t row = spans.quotient(i);
    const std::int64_t at = row * channels;
    with_span(span_at(spans.remainder(i) * packet, channels, aligned), [&](const Span& span) {
      const Raw<T> g = load_raw(gate + at, span), u = load_raw(up + at, span);
      const float share = r.weights[r.slots[row]];  // after the loads, since it waits for a load of its own
      Floats p = widened(g);
      const Floats q = widened(u);
      for (int k = 0; k < packet; ++k) p.x[k] = share * numerics::swiglu(p.x[k], q.x[k]);
      store(y + at, span, p);
    });
  });
}

template <class T>
TANDEM_KERNEL_BY(warp_row_threads, 8)
expert_swiglu_backward_kernel(const T* dy, const T* gate, const T* up, Routes r, T* dgate, T* dup,
                              float* drouting_weights, std::int64_t channels, bool aligned) {
  for_warp_rows(r.slot_count(), [&](std::int64_t row) {
    const std::int32_t slot = r.slots[row];
    const std::int64_t at = row * channels;
    float dshare = 0.0F;
    for_lane_spans(channels, aligned, [&](const Span& span) {
      const Floats d = load(dy + at, span);
      Floats g = load(gate + at, span), u = load(up + at, span);
      const float share = r.weights[slot];  // after the loads, since it waits for a load of its own
      for (int i = 0; i < packet; ++i) {
        const float activated = d.x[i] * numerics::silu(g.x[i]), shared = share * d.x[i];
        dshare = numerics::fma(activated, u.x[i], dshare);
        g.x[i] = shared * u.x[i] * numerics::silu_derivative(g.x[i]);
        u.x[i] = share * activated;
      }
      store(dgate + at, span, g);
      store(dup + at, span, u);
    });
    dshare = warp_sum(dshare);
    if (own_lane() == 0) drouting_weights[slot] = dshare;
  });
}

/// x += the rows that `rows` names, one after the other.
template <class T>
TANDEM_DEVICE void add_rows(Floats& sum, const T* x, const std::int32_t* rows, std::int64_t count,
                            std::int64_t channels, const Span& span) {
  constexpr int ahead = 4;  // reads that wait for memory together
  for (std::int64_t first = 0; first < count; first += ahead) {
    Raw<T> next[ahead] = {};
    TANDEM_UNROLL
    for (int i = 0; i < ahead; ++i) {
      if (first + i < count) next[i] = load_raw(x + rows[first + i] * channels, span);
    }
    TANDEM_UNROLL
    for (int i = 0; i < ahead; ++i) {
      const Floats p = widened(next[i]);
      if (first + i >= count) continue;
      for (int k = 0; k < packet; ++k) sum.x[k] = sum.x[k] + p.x[k];
    }
  }
}

/// A block for each token. `residual` is null where there is none.
template <class T>
TANDEM_KERNEL(most_threads)
sum_rows_kernel(const T* x, Routes r, const T* residual, T* y, std::int64_t channels, bool aligned) {
  for (std::int64_t token = block_index(); token < r.tokens; token += grid_size()) {
    const std::int64_t at = token * channels;
    for_row_spans(channels, aligned, [&](const Span& span) {
      Floats before = {}, sum = {};
      if (residual != nullptr) before = load(residual + at, span);
      add_rows(sum, x, r.rows + token * r.choices, r.choices, channels, span);
      for (int i = 0; i < packet; ++i) sum.x[i] = before.x[i] + sum.x[i];
      store(y + at, span, sum);
    });
  }
}

Routes routes(const Routing& r) {
  return {r.experts.as<std::int32_t>(), r.weights.as<float>(), r.begins.as<std::int32_t>(), r.slots.as<std::int32_t>(),
          r.rows.as<std::int32_t>(),    r.experts.shape[0],    r.experts.shape[1],          r.begins.shape[0] - 1};
}

}  // namespace

void route(TensorView logits, bool normalized, const Routing& routing, CUstream_st* stream) {
  const Routes r = routes(routing);
  launch("choose_experts", choose_kernel, warp_row_geometry(r.tokens), stream, logits.as<float>(), r, normalized);
  launch("sort_rows", sort_rows_kernel, Geometry{blocks_for(r.count, 1), most_threads}, stream, r);
}

void route_backward(TensorView drouting_weights, TensorView logits, bool normalized, const Routing& routing,
                    TensorView dlogits, CUstream_st* stream) {
  const Routes r = routes(routing);
  with_activation(dlogits.dtype, [&]<class T>(T) {
    launch("choose_experts_backward", choose_backward_kernel<T>, warp_row_geometry(r.tokens), stream,
           drouting_weights.as<float>(), logits.as<float>(), r, dlogits.as<T>(), normalized);
  });
}

void expert_swiglu(TensorView gate, TensorView up, const Routing& routing, TensorView y, CUstream_st* stream) {
  const std::int64_t rows = gate.shape[0], channels = gate.shape[1], spans = ceil_div(channels, packet);
  const std::uint32_t items = numbered_items("expert_swiglu", rows * spans);
  with_activation(gate.dtype, [&]<class T>(T) {
    launch("expert_swiglu", expert_swiglu_kernel<T>, Geometry{blocks_for(items, most_threads), most_threads}, stream,
           gate.as<T>(), up.as<T>(), routes(routing), y.as<T>(), divisor_by(spans), items, channels,
           whole_packets<T>(channels) && aligned(gate.data, up.data, y.data));
  });
}

void expert_swiglu_backward(TensorView dy, TensorView gate, TensorView up, const Routing& routing, TensorView dgate,
                            TensorView dup, TensorView drouting_weights, CUstream_st* stream) {
  const std::int64_t rows = gate.shape[0], channels = gate.shape[1];
  with_activation(gate.dtype, [&]<class T>(T) {
    launch("expert_swiglu_backward", expert_swiglu_backward_kernel<T>, warp_row_geometry(rows), stream, dy.as<T>(),
           gate.as<T>(), up.as<T>(), routes(routing), dgate.as<T>(), dup.as<T>(), drouting_weights.as<float>(),
           channels, whole_packets<T>(channels) && aligned(dy.data, gate.data, up.data, dgate.data, dup.data));
  });
}

void sum_rows(TensorView x, const Routing& routing, TensorView residual, TensorView y, CUstream_st* stream) {
  const std::int64_t channels = y.shape[1];
  with_activation(y.dtype, [&]<class T>(T) {
    launch("sum_rows", sum_rows_kernel<T>, row_geometry(y.shape[0], channels), stream, x.as<T>(), routes(routing),
           optional<T>(residual), y.as<T>(), channels,
           whole_packets<T>(channels) && aligned(x.data, residual.data, y.data));
  });
}

}  // namespace tandem::gpu
