// Activations, sums of residuals, rotary embedding: one pass over memory, in place where core/ops/ops.hpp allows.
#include "core/numerics/activation.hpp"
#include "gpu_ops/base/kernels.hpp"
#include "gpu_ops/base/launch.hpp"
#include "gpu_ops/kernels/magnitude.hpp"

namespace tandem::gpu {
namespace {

template <class T, bool finds>
TANDEM_KERNEL(most_threads)
gelu_kernel(const T* x, T* y, Largest* largest, std::int64_t count, bool aligned) {
  TANDEM_SHARED(std::uint32_t, room, most_warps);
  Magnitude<finds> magnitude(largest);
  for_spans(count, aligned, [&](const Span& span) {
    Floats p = load(x, span);
    for (int i = 0; i < packet; ++i) p.x[i] = numerics::gelu(p.x[i]);
    magnitude.store(y, span, p);
  });
  magnitude.write(room);
}

template <class T, bool finds>
TANDEM_KERNEL(most_threads)
gelu_backward_kernel(const T* dy, const T* x, T* dx, Largest* largest, std::int64_t count, bool aligned) {
  TANDEM_SHARED(std::uint32_t, room, most_warps);
  Magnitude<finds> magnitude(largest);
  for_spans(count, aligned, [&](const Span& span) {
    Floats p = load(x, span);
    const Floats d = load(dy, span);
    for (int i = 0; i < packet; ++i) p.x[i] = d.x[i] * numerics::gelu_derivative(p.x[i]);
    magnitude.store(dx, span, p);
  });
  magnitude.write(room);
}

template <class T, class Gate, bool finds>
TANDEM_KERNEL(most_threads)
gated_kernel(const T* gate, const T* up, T* y, Largest* largest, std::int64_t count, bool aligned) {
  TANDEM_SHARED(std::uint32_t, room, most_warps);
  Magnitude<finds> magnitude(largest);
  for_spans(count, aligned, [&](const Span& span) {
    Floats p = load(gate, span);
    const Floats u = load(up, span);
    for (int i = 0; i < packet; ++i) p.x[i] = numerics::mul(Gate::value(p.x[i]), u.x[i]);
    magnitude.store(y, span, p);
  });
  magnitude.write(room);
}

template <class T, class Gate, bool finds>
TANDEM_KERNEL(most_threads)
gated_backward_kernel(const T* dy, const T* gate, const T* up, T* dgate, T* dup, Largest* largest_dgate,
                      Largest* largest_dup, std::int64_t count, bool aligned) {
  TANDEM_SHARED(std::uint32_t, room, 2 * most_warps);
  Magnitude<finds> of_gate(largest_dgate), of_up(largest_dup);
  for_spans(count, aligned, [&](const Span& span) {
    const Floats d = load(dy, span);
    Floats g = load(gate, span), u = load(up, span);
    for (int i = 0; i < packet; ++i) {
      const float dgate_i = d.x[i] * u.x[i] * Gate::derivative(g.x[i]);
      u.x[i] = d.x[i] * Gate::value(g.x[i]);
      g.x[i] = dgate_i;
    }
    of_gate.store(dgate, span, g);
    of_up.store(dup, span, u);
  });
  of_gate.write(room);
  of_up.write(room + most_warps);
}

template <class T>
TANDEM_KERNEL(most_threads)
add_kernel(const T* a, const T* b, T* y, std::int64_t count, bool aligned) {
  for_spans(count, aligned, [&](const Span& span) {
    Floats p = load(a, span);
    const Floats q = load(b, span);
    for (int i = 0; i < packet; ++i) p.x[i] = p.x[i] + q.x[i];
    store(y, span, p);
  });
}

/// `residual` is null where there is none.
template <class T>
TANDEM_KERNEL(most_threads)
add_scaled_kernel(const T* x, float factor, const T* residual, T* y, std::int64_t count, bool aligned) {
  for_spans(count, aligned, [&](const Span& span) {
    Floats p = load(x, span), before = {};
    if (residual != nullptr) before = load(residual, span);
    for (int i = 0; i < packet; ++i) {
      p.x[i] = residual == nullptr ? factor * p.x[i] : numerics::fma(factor, p.x[i], before.x[i]);
    }
    store(y, span, p);
  });
}

/// Heads of a token that a thread turns, by the same angles.
constexpr int heads_at_once = 2;

struct RopeShape {
  std::int64_t heads, dim, half;    ///< 2 half of dim elements are turned
  const std::int32_t* first;        ///< (tokens) where each token's record begins in its row, or null
  Divisor sequence, groups, spans;  ///< groups: of heads; spans: of a head's pairs
};

/// A thread turns eight pairs, or what is left of a head's, of a group of heads.
template <class T>
TANDEM_KERNEL_BY(most_threads, sizeof(T) == sizeof(bf16) ? 4 : 1)
rope_kernel(T* x, const float* table, RopeShape shape, std::uint32_t items, float sign, bool aligned) {
  for_items(items, [&](std::uint32_t i) {
    const std::uint32_t group = shape.spans.quotient(i), token = shape.groups.quotient(group);
    const std::int64_t head = shape.groups.remainder(group) * heads_at_once;
    const std::int64_t in_row = shape.sequence.remainder(token);
    const std::int64_t place = shape.first == nullptr ? in_row : in_row - shape.first[token];
    T* const first = x + (token * shape.heads + head) * shape.dim;
    const auto is_head = [&](int h) { return h == 0 || head + h < shape.heads; };
    with_span(span_at(shape.spans.remainder(i) * packet, shape.half, aligned), [&](const Span& span) {
      Raw<T> low[heads_at_once] = {}, high[heads_at_once] = {};
      TANDEM_UNROLL
      for (int h = 0; h < heads_at_once; ++h) {
        if (!is_head(h)) continue;
        low[h] = load_raw(first + h * shape.dim, span);
        high[h] = load_raw(first + h * shape.dim + shape.half, span);
      }
      // Cosine and sine by turns: two packets for one of pairs.
      const float* const angles = table + place * shape.half * 2;
      Floats angle[2] = {load(angles, Span{2 * span.at, 2 * span.count < packet ? 2 * span.count : packet, span.wide}),
                         load(angles, Span{2 * span.at + packet, 2 * span.count - packet, span.wide})};
      TANDEM_UNROLL
      for (int j = 1; j < packet; j += 2) {
        angle[0].x[j] = sign * angle[0].x[j];
        angle[1].x[j] = sign * angle[1].x[j];
      }
      TANDEM_UNROLL
      for (int h = 0; h < heads_at_once; ++h) {
        if (!is_head(h)) continue;
        Floats a = widened(low[h]), b = widened(high[h]);
        TANDEM_UNROLL
        for (int j = 0; j < packet; ++j) {
          const Floats& pair = angle[2 * j / packet];
          const float cosine = pair.x[2 * j % packet], sine = pair.x[2 * j % packet + 1], before = a.x[j];
          a.x[j] = numerics::fma(before, cosine, -(b.x[j] * sine));
          b.x[j] = numerics::fma(b.x[j], cosine, before * sine);
        }
        store(first + h * shape.dim, span, a);
        store(first + h * shape.dim + shape.half, span, b);
      }
    });
  });
}

template <class Gate>
void gated(const char* name, TensorView gate, TensorView up, MeasuredView y, CUstream_st* stream) {
  with_activation(gate.dtype, [&]<class T>(T) {
    with_finding(y.magnitude != nullptr, [&]<bool finds>(std::bool_constant<finds>) {
      launch(name, gated_kernel<T, Gate, finds>, measured(pointwise_geometry(gate.count()), y), stream, gate.as<T>(),
             up.as<T>(), y.values.as<T>(), largest_of(y), gate.count(), aligned(gate.data, up.data, y.values.data));
    });
  });
}

template <class Gate>
void gated_backward(const char* name, TensorView dy, TensorView gate, TensorView up, MeasuredView dgate,
                    MeasuredView dup, CUstream_st* stream) {
  const Geometry geometry = measured(measured(pointwise_geometry(gate.count()), dgate), dup);
  with_activation(gate.dtype, [&]<class T>(T) {
    with_finding(dgate.magnitude != nullptr || dup.magnitude != nullptr, [&]<bool finds>(std::bool_constant<finds>) {
      launch(name, gated_backward_kernel<T, Gate, finds>, geometry, stream, dy.as<T>(), gate.as<T>(), up.as<T>(),
             dgate.values.as<T>(), dup.values.as<T>(), largest_of(dgate), largest_of(dup), gate.count(),
             aligned(dy.data, gate.data, up.data, dgate.values.data, dup.values.data));
    });
  });
}

}  // namespace

void gelu(TensorView x, MeasuredView y, CUstream_st* stream) {
  with_activation(x.dtype, [&]<class T>(T) {
    with_finding(y.magnitude != nullptr, [&]<bool finds>(std::bool_constant<finds>) {
      launch("gelu", gelu_kernel<T, finds>, measured(pointwise_geometry(x.count()), y), stream, x.as<T>(),
             y.values.as<T>(), largest_of(y), x.count(), aligned(x.data, y.values.data));
    });
  });
}

void gelu_backward(TensorView dy, TensorView x, MeasuredView dx, CUstream_st* stream) {
  with_activation(x.dtype, [&]<class T>(T) {
    with_finding(dx.magnitude != nullptr, [&]<bool finds>(std::bool_constant<finds>) {
      launch("gelu_backward", gelu_backward_kernel<T, finds>, measured(pointwise_geometry(x.count()), dx), stream,
             dy.as<T>(), x.as<T>(), dx.values.as<T>(), largest_of(dx), x.count(),
             aligned(dy.data, x.data, dx.values.data));
    });
  });
}

void swiglu(TensorView gate, TensorView up, MeasuredView y, CUstream_st* stream) {
  gated<numerics::SiluGate>("swiglu", gate, up, y, stream);
}

void swiglu_backward(TensorView dy, TensorView gate, TensorView up, MeasuredView dgate, MeasuredView dup,
                     CUstream_st* stream) {
  gated_backward<numerics::SiluGate>("swiglu_backward", dy, gate, up, dgate, dup, stream);
}

void geglu(TensorView gate, TensorView up, MeasuredView y, CUstream_st* stream) {
  gated<numerics::GeluGate>("geglu", gate, up, y, stream);
}

void geglu_backward(TensorView dy, TensorView gate, TensorView up, MeasuredView dgate, MeasuredView dup,
                    CUstream_st* stream) {
  gated_backward<numerics::GeluGate>("geglu_backward", dy, gate, up, dgate, dup, stream);
}

void add(TensorView a, TensorView b, TensorView y, CUstream_st* stream) {
  with_activation(a.dtype, [&]<class T>(T) {
    launch("add", add_kernel<T>, pointwise_geometry(a.count()), stream, a.as<T>(), b.as<T>(), y.as<T>(), a.count(),
           aligned(a.data, b.data, y.data));
  });
}

void add_scaled(TensorView x, float factor, TensorView residual, TensorView y, CUstream_st* stream) {
  with_activation(x.dtype, [&]<class T>(T) {
    launch("add_scaled", add_scaled_kernel<T>, pointwise_geometry(x.count()), stream, x.as<T>(), factor,
           optional<T>(residual), y.as<T>(), x.count(), aligned(x.data, residual.data, y.data));
  });
}

void rope(TensorView x, TensorView table, RecordsView records, bool inverse, CUstream_st* stream) {
  const std::int64_t heads = x.shape[2], dim = x.shape[3], half = table.shape[1];
  const std::int64_t groups = ceil_div(heads, heads_at_once), spans = ceil_div(half, packet);
  const std::uint32_t items = numbered_items("rope", x.shape[0] * x.shape[1] * groups * spans);
  const RopeShape shape{heads, dim, half, records.first, divisor_by(x.shape[1]), divisor_by(groups), divisor_by(spans)};
  with_activation(x.dtype, [&]<class T>(T) {
    launch("rope", rope_kernel<T>, Geometry{blocks_for(items, most_threads), most_threads}, stream, x.as<T>(),
           table.as<float>(), shape, items, inverse ? -1.0F : 1.0F,
           aligned(x.data, table.data) && whole_packets<T>(half) && whole_packets<T>(dim));
  });
}

}  // namespace tandem::gpu
