#pragma once
// Lion (Chen et al., arXiv 2302.06675, Algorithm 2) for one element, as a fixed sequence of correctly rounded fp32
// operations. As for AdamW (core/numerics/adam.hpp), all kernels evaluate exactly this sequence.
#include "core/numerics/adam.hpp"
#include "core/numerics/ieee.hpp"

namespace tandem::numerics {

/// -1, 0 or 1; NaN of NaN, so that a fault in the state does not pass as a step.
TANDEM_HD float sign_of(float x) { return x > 0.0F ? 1.0F : x < 0.0F ? -1.0F : x == 0.0F ? 0.0F : x; }

struct LionElement {
  float master;
  float m;
};

/// One element. `gradient` is the bf16 gradient widened to fp32, before `gradient_scale`. Of the coefficients those of
/// bias correction and eps have no meaning.
TANDEM_HD LionElement lion(LionElement s, float gradient, const AdamCoefficients& c) {
  const float g = mul(gradient, c.gradient_scale);
  const float direction = sign_of(fma(c.beta1, s.m, mul(c.one_minus_beta1, g)));
  const float decayed = fma(c.minus_decay, s.master, s.master);
  return {fma(c.minus_lr, direction, decayed), fma(c.beta2, s.m, mul(c.one_minus_beta2, g))};
}

}  // namespace tandem::numerics
