#pragma once
// The few IEEE fp32 operations whose rounding must not depend on the compiler: every one is a single
// correctly rounded operation, spelled so that neither contraction nor reassociation can touch it.
// The build adds -ffp-contract=off; the CUDA side uses the __f*_rn intrinsics for the same reason.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/numerics/host_device.hpp"

namespace tandem::numerics {

TANDEM_HD std::uint32_t float_bits(float x) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(x);
#else
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
#endif
}

TANDEM_HD float bits_float(std::uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
#endif
}

/// a * b + c, rounded once.
TANDEM_HD float fma(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

TANDEM_HD float mul(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

TANDEM_HD float add(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

TANDEM_HD float div(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

/// 1 / a, the bits of div(1, a), for |a| from 2^-120 to 2^120: on a GPU an estimate and one step of Newton, as
/// __frcp_rn does it where the exponent allows, without the branch for where it does not.
TANDEM_HD float reciprocal(float a) {
#ifdef __CUDA_ARCH__
  float estimate;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(a));
  return __fmaf_rn(estimate, -__fmaf_rn(a, estimate, -1.0F), estimate);
#else
  return 1.0F / a;
#endif
}

TANDEM_HD float sqrt(float a) {
#ifdef __CUDA_ARCH__
  return __fsqrt_rn(a);
#else
  return __builtin_sqrtf(a);
#endif
}

}  // namespace tandem::numerics
