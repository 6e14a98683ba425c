#include "core/numerics/activation.hpp"
#include "cpu_ops/reference/element_access.hpp"
#include "cpu_ops/reference/reference.hpp"

namespace tandem::reference {
namespace {

// The formula of an element is the project's own, in fp32; it is checked against double where it is tested.
float single(const TensorView& view, std::int64_t i) { return static_cast<float>(get(view, i)); }

template <class Gate>
void gated(TensorView gate, TensorView up, TensorView y) {
  for (std::int64_t i = 0; i < gate.count(); ++i) {
    put(y, i, static_cast<double>(Gate::value(single(gate, i)) * single(up, i)));
  }
}

template <class Gate>
void gated_backward(TensorView dy, TensorView gate, TensorView up, TensorView dgate, TensorView dup) {
  for (std::int64_t i = 0; i < gate.count(); ++i) {
    const float d = single(dy, i), g = single(gate, i), u = single(up, i);
    put(dgate, i, static_cast<double>(d * u * Gate::derivative(g)));
    put(dup, i, static_cast<double>(d * Gate::value(g)));
  }
}

}  // namespace

void gelu(TensorView x, TensorView y) {
  for (std::int64_t i = 0; i < x.count(); ++i) put(y, i, static_cast<double>(numerics::gelu(single(x, i))));
}

void gelu_backward(TensorView dy, TensorView x, TensorView dx) {
  for (std::int64_t i = 0; i < x.count(); ++i) {
    put(dx, i, static_cast<double>(single(dy, i) * numerics::gelu_derivative(single(x, i))));
  }
}

void swiglu(TensorView gate, TensorView up, TensorView y) { gated<numerics::SiluGate>(gate, up, y); }

void swiglu_backward(TensorView dy, TensorView gate, TensorView up, TensorView dgate, TensorView dup) {
  gated_backward<numerics::SiluGate>(dy, gate, up, dgate, dup);
}

void geglu(TensorView gate, TensorView up, TensorView y) { gated<numerics::GeluGate>(gate, up, y); }

void geglu_backward(TensorView dy, TensorView gate, TensorView up, TensorView dgate, TensorView dup) {
  gated_backward<numerics::GeluGate>(dy, gate, up, dgate, dup);
}

void add(TensorView a, TensorView b, TensorView y) {
  for (std::int64_t i = 0; i < a.count(); ++i) put(y, i, get(a, i) + get(b, i));
}

void add_scaled(TensorView x, float factor, TensorView residual, TensorView y) {
  for (std::int64_t i = 0; i < x.count(); ++i) {
    const float scaled = single(x, i);
    put(y, i, static_cast<double>(residual ? numerics::fma(factor, scaled, single(residual, i)) : factor * scaled));
  }
}

}  // namespace tandem::reference
