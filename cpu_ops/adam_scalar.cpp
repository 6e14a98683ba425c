#include "core/numerics/norm_block.hpp"
#include "cpu_ops/adam_kernels.hpp"

namespace tandem::kernels {

void adamw_from(std::int64_t begin, const AdamPiece& p, const AdamCoefficients& c) {
  for (std::int64_t i = begin; i < p.count; ++i) {
    const numerics::AdamElement next =
        numerics::adamw({p.master[i], p.m[i], p.v[i]}, numerics::bf16_to_float(p.gradient[i]), c);
    p.master[i] = next.master;
    p.m[i] = next.m;
    p.v[i] = next.v;
    p.weight[i] = numerics::weight_of_master(next.master);
  }
}

void adamw_scalar(const AdamPiece& piece, const AdamCoefficients& c) { adamw_from(0, piece, c); }

double fold_norm_lanes(double* lane, const bf16* gradient, std::int64_t begin, std::int64_t count) {
  for (std::int64_t i = begin; i < count; ++i) {
    const double g = static_cast<double>(numerics::bf16_to_float(gradient[i]));
    lane[i - begin] += g * g;
  }
  for (int distance = numerics::norm_lanes / 2; distance > 0; distance /= 2) {
    for (int j = 0; j < distance; ++j) lane[j] += lane[j + distance];
  }
  return lane[0];
}

}  // namespace tandem::kernels
