#pragma once
// Pointwise activations of the transformer block, forward and derivative. Beyond the numbers that they are held within,
// nothing of the result changes but what is below 1e-32; NaN stays NaN.
#include "core/numerics/functions.hpp"

namespace tandem::numerics {

TANDEM_HD float at_least(float low, float x) { return x < low ? low : x; }
TANDEM_HD float at_most(float high, float x) { return x > high ? high : x; }

/// GELU, tanh form (Hendrycks and Gimpel, arXiv 1606.08415): 0.5 x (1 + tanh(k (x + 0.044715 x^3))) with k = sqrt(2 /
/// pi), which is x times the logistic function of u = 2 k (x + 0.044715 x^3), without the difference that cancels.
struct Gelu {
  static constexpr float two_k = 1.5957691216057308F;
  static constexpr float cubic = 0.0713548162726009F;  ///< 2 k 0.044715
  static constexpr float bound = 9.5F;                 ///< |u| is 76 there
};

TANDEM_HD float gelu(float x) {
  const float above = at_least(-Gelu::bound, x), within = at_most(Gelu::bound, above);
  const float u = mul(within, fma(mul(within, within), Gelu::cubic, Gelu::two_k));
  return mul(above, logistic_within_80(u).value);
}

TANDEM_HD float gelu_derivative(float x) {
  const float within = at_most(Gelu::bound, at_least(-Gelu::bound, x));
  const float square = mul(within, within);
  const Logistic s = logistic_within_80(mul(within, fma(square, Gelu::cubic, Gelu::two_k)));
  const float u_derivative = fma(square, 3.0F * Gelu::cubic, Gelu::two_k);
  return mul(s.value, fma(mul(within, s.complement), u_derivative, 1.0F));
}

/// x times its logistic function.
TANDEM_HD float silu(float x) {
  const float above = at_least(-80.0F, x);
  return mul(above, logistic_within_80(at_most(80.0F, above)).value);
}

TANDEM_HD float silu_derivative(float x) {
  const float within = at_most(80.0F, at_least(-80.0F, x));
  const Logistic s = logistic_within_80(within);
  return mul(s.value, fma(within, s.complement, 1.0F));
}

/// SwiGLU and GeGLU (Shazeer, arXiv 2002.05202): silu(gate) * up, gelu(gate) * up.
TANDEM_HD float swiglu(float gate, float up) { return mul(silu(gate), up); }

/// The gate functions of swiglu and geglu, as template arguments of kernels.
struct SiluGate {
  TANDEM_HD static float value(float x) { return silu(x); }
  TANDEM_HD static float derivative(float x) { return silu_derivative(x); }
};
struct GeluGate {
  TANDEM_HD static float value(float x) { return gelu(x); }
  TANDEM_HD static float derivative(float x) { return gelu_derivative(x); }
};

}  // namespace tandem::numerics
