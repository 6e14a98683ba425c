#pragma once
// AdamW (Loshchilov and Hutter, arXiv 1711.05101) for one element, as a fixed sequence of correctly
// rounded fp32 operations. Scalar, AVX2, AVX-512 and CUDA kernels all evaluate exactly this sequence,
// so that they agree bit for bit.
#include <cmath>
#include <cstdint>

#include "core/numerics/bf16.hpp"
#include "core/numerics/ieee.hpp"

namespace tandem {

/// Hyperparameters of AdamW, and of Lion, which ignores eps. Dimensionless. The engine wants betas in [0, 1), and in
/// fp32 eps above 0 and a finite weight decay of at least 0.
struct AdamW {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
};

/// Coefficients of one step, rounded to fp32 once. A pure function of the step number: neither subgroup, processor, nor
/// history enters (see `adam_coefficients`).
struct AdamCoefficients {
  float gradient_scale = 0.0F;  ///< multiplies the bf16 gradient: clip factor times unscaling
  float beta1 = 0.0F;
  float one_minus_beta1 = 0.0F;
  float beta2 = 0.0F;
  float one_minus_beta2 = 0.0F;
  float inv_sqrt_correction2 = 0.0F;  ///< 1 / sqrt(1 - beta2^t)
  float eps = 0.0F;
  float minus_step_size = 0.0F;  ///< -lr / (1 - beta1^t)
  float minus_lr = 0.0F;         ///< the step of Lion, which corrects no bias
  float minus_decay = 0.0F;      ///< -lr * weight_decay; 0 where the parameter does not decay
  std::uint64_t seed = 0;        ///< seed of stochastic rounding, used with `step`
  std::uint64_t step = 0;        ///< t
};

namespace numerics {

/// `t` counts from 1. Computed in double on the host.
inline AdamCoefficients adam_coefficients(const AdamW& h, std::int64_t t, double lr, double gradient_scale, bool decay,
                                          std::uint64_t seed = 0) {
  const double correction1 = -std::expm1(static_cast<double>(t) * std::log(h.beta1));
  const double correction2 = -std::expm1(static_cast<double>(t) * std::log(h.beta2));
  return {.gradient_scale = static_cast<float>(gradient_scale),
          .beta1 = static_cast<float>(h.beta1),
          .one_minus_beta1 = static_cast<float>(1.0 - h.beta1),
          .beta2 = static_cast<float>(h.beta2),
          .one_minus_beta2 = static_cast<float>(1.0 - h.beta2),
          .inv_sqrt_correction2 = static_cast<float>(1.0 / std::sqrt(correction2)),
          .eps = static_cast<float>(h.eps),
          .minus_step_size = static_cast<float>(-lr / correction1),
          .minus_lr = static_cast<float>(-lr),
          .minus_decay = decay ? static_cast<float>(-lr * h.weight_decay) : 0.0F,
          .seed = seed,
          .step = static_cast<std::uint64_t>(t)};
}

struct AdamElement {
  float master;
  float m;
  float v;
};

/// The moments of a step; `g` is the gradient, scaled.
TANDEM_HD float adam_m(float m, float g, const AdamCoefficients& c) {
  return fma(c.beta1, m, mul(c.one_minus_beta1, g));
}
TANDEM_HD float adam_v(float v, float g, const AdamCoefficients& c) {
  return fma(mul(c.one_minus_beta2, g), g, mul(c.beta2, v));
}
/// The direction of a step, from its moments before they are rounded to what is stored.
TANDEM_HD float adam_direction(float m, float v, const AdamCoefficients& c) {
  return div(m, fma(sqrt(v), c.inv_sqrt_correction2, c.eps));
}
TANDEM_HD float adam_master(float master, float direction, const AdamCoefficients& c) {
  return fma(c.minus_step_size, direction, fma(c.minus_decay, master, master));
}

/// One element. `gradient` is the bf16 gradient widened to fp32, before `gradient_scale`.
TANDEM_HD AdamElement adamw(AdamElement s, float gradient, const AdamCoefficients& c) {
  const float g = mul(gradient, c.gradient_scale);
  const float m = adam_m(s.m, g, c);
  const float v = adam_v(s.v, g, c);
  return {adam_master(s.master, adam_direction(m, v, c), c), m, v};
}

}  // namespace numerics
}  // namespace tandem
