#pragma once
// Pointwise activations of the transformer block, forward and derivative.
#include "core/numerics/functions.hpp"

namespace tandem::numerics {

/// GELU, tanh form (Hendrycks and Gimpel, arXiv 1606.08415): 0.5 x (1 + tanh(k (x + 0.044715 x^3))).
TANDEM_HD float gelu(float x) {
  constexpr float k = 0.7978845608028654F;  // sqrt(2 / pi)
  const float inner = mul(k, fma(mul(0.044715F, mul(x, x)), x, x));
  return mul(mul(0.5F, x), add(1.0F, tanh(inner)));
}

TANDEM_HD float gelu_derivative(float x) {
  constexpr float k = 0.7978845608028654F;
  const float x2 = mul(x, x);
  const float inner = mul(k, fma(mul(0.044715F, x2), x, x));
  const float t = tanh(inner);
  const float inner_derivative = mul(k, fma(0.134145F, x2, 1.0F));
  const float sech2 = fma(-t, t, 1.0F);
  return fma(mul(mul(0.5F, x), sech2), inner_derivative, mul(0.5F, add(1.0F, t)));
}

TANDEM_HD float silu(float x) { return mul(x, sigmoid(x)); }

TANDEM_HD float silu_derivative(float x) {
  const float s = sigmoid(x);
  return mul(s, fma(x, add(1.0F, -s), 1.0F));
}

/// SwiGLU (Shazeer, arXiv 2002.05202): silu(gate) * up.
TANDEM_HD float swiglu(float gate, float up) { return mul(silu(gate), up); }

}  // namespace tandem::numerics
