#include "core/numerics/activation.hpp"
#include "cpu_ops/kernels/elements.hpp"
#include "cpu_ops/kernels/kernels.hpp"
#include "cpu_ops/kernels/magnitude.hpp"

namespace tandem::fast {
namespace {

/// Elements that a thread takes at once: whole cache lines, well inside the second-level cache.
constexpr std::int64_t at_once = 16 * 1024;

/// y[i] = f(inputs[i]...): every element is read before it is written, so `y` may be one of the inputs.
template <class T, class F, class... Inputs>
void map(Parallel& parallel, const F& f, MeasuredView to, const Inputs*... inputs) {
  T* const y = to.values.as<T>();
  const Magnitude largest(to.magnitude);
  for_ranges(parallel, to.values.count(), at_once, [=](std::int64_t begin, std::int64_t length) {
    vectorised([=] {
      const std::int64_t end = begin + length;
#pragma GCC ivdep
      for (std::int64_t i = begin; i < end; ++i) y[i] = from_float<T>(f(to_float(inputs[i])...));
    });
    largest.add(y + begin, length);
  });
}

/// y = Gate(gate) * up.
template <class Gate>
void gated(Parallel& parallel, TensorView gate, TensorView up, MeasuredView y) {
  with_activation(gate.dtype, [&]<class T>(T) {
    map<T>(
        parallel, [](float g, float u) { return numerics::mul(Gate::value(g), u); }, y, gate.as<T>(), up.as<T>());
  });
}

template <class Gate>
void gated_backward(Parallel& parallel, TensorView dy, TensorView gate, TensorView up, MeasuredView dgate,
                    MeasuredView dup) {
  with_activation(gate.dtype, [&]<class T>(T) {
    const T *const d = dy.as<T>(), *const g = gate.as<T>(), *const u = up.as<T>();
    T *const dg = dgate.values.as<T>(), *const du = dup.values.as<T>();
    const Magnitude of_gate(dgate.magnitude), of_up(dup.magnitude);
    for_ranges(parallel, gate.count(), at_once, [=](std::int64_t begin, std::int64_t length) {
      vectorised([=] {
        const std::int64_t end = begin + length;
#pragma GCC ivdep
        for (std::int64_t i = begin; i < end; ++i) {
          const float gradient = to_float(d[i]), x = to_float(g[i]), y = to_float(u[i]);
          dg[i] = from_float<T>(gradient * y * Gate::derivative(x));
          du[i] = from_float<T>(gradient * Gate::value(x));
        }
      });
      of_gate.add(dg + begin, length);
      of_up.add(du + begin, length);
    });
  });
}

}  // namespace

void gelu(Parallel& parallel, TensorView x, MeasuredView y) {
  with_activation(x.dtype, [&]<class T>(T) {
    map<T>(
        parallel, [](float a) { return numerics::gelu(a); }, y, x.as<T>());
  });
}

void gelu_backward(Parallel& parallel, TensorView dy, TensorView x, MeasuredView dx) {
  with_activation(x.dtype, [&]<class T>(T) {
    map<T>(
        parallel, [](float d, float a) { return d * numerics::gelu_derivative(a); }, dx, dy.as<T>(), x.as<T>());
  });
}

void swiglu(Parallel& parallel, TensorView gate, TensorView up, MeasuredView y) {
  gated<numerics::SiluGate>(parallel, gate, up, y);
}

void swiglu_backward(Parallel& parallel, TensorView dy, TensorView gate, TensorView up, MeasuredView dgate,
                     MeasuredView dup) {
  gated_backward<numerics::SiluGate>(parallel, dy, gate, up, dgate, dup);
}

void geglu(Parallel& parallel, TensorView gate, TensorView up, MeasuredView y) {
  gated<numerics::GeluGate>(parallel, gate, up, y);
}

void geglu_backward(Parallel& parallel, TensorView dy, TensorView gate, TensorView up, MeasuredView dgate,
                    MeasuredView dup) {
  gated_backward<numerics::GeluGate>(parallel, dy, gate, up, dgate, dup);
}

void add(Parallel& parallel, TensorView a, TensorView b, TensorView y) {
  with_activation(a.dtype, [&]<class T>(T) {
    map<T>(
        parallel, [](float p, float q) { return p + q; }, y, a.as<T>(), b.as<T>());
  });
}

void add_scaled(Parallel& parallel, TensorView x, float factor, TensorView residual, TensorView y) {
  with_activation(x.dtype, [&]<class T>(T) {
    if (residual) {
      map<T>(
          parallel, [factor](float a, float before) { return numerics::fma(factor, a, before); }, y, x.as<T>(),
          residual.as<T>());
    } else {
      map<T>(
          parallel, [factor](float a) { return factor * a; }, y, x.as<T>());
    }
  });
}

void rope(Parallel& parallel, TensorView x, TensorView table, bool inverse, RecordsView records) {
  const TokenRows rows(x.shape[1], records);
  const std::int64_t heads = x.shape[2], dim = x.shape[3], half = table.shape[1];
  const float* const rotations = table.as<float>();
  const float sign = inverse ? -1.0F : 1.0F;
  with_activation(x.dtype, [&]<class T>(T) {
    T* const data = x.as<T>();
    for_ranges(parallel, x.shape[0] * rows.sequence, 8, [=](std::int64_t begin, std::int64_t length) {
      vectorised([=] {
        for (std::int64_t token = begin; token < begin + length; ++token) {
          const float* const rotation = rotations + rows.position(token) * 2 * half;
          for (std::int64_t h = 0; h < heads; ++h) {
            T* const low = data + (token * heads + h) * dim;
            T* const high = low + half;
#pragma GCC ivdep
            for (std::int64_t i = 0; i < half; ++i) {
              const float cosine = rotation[2 * i], sine = sign * rotation[2 * i + 1];
              const float a = to_float(low[i]), b = to_float(high[i]);
              low[i] = from_float<T>(numerics::fma(a, cosine, -(b * sine)));
              high[i] = from_float<T>(numerics::fma(b, cosine, a * sine));
            }
          }
        }
      });
    });
  });
}

}  // namespace tandem::fast
