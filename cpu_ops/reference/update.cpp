#include <algorithm>

#include "core/numerics/norm_block.hpp"
#include "cpu_ops/reference/reference.hpp"

namespace tandem::reference {

void adamw(const AdamPiece& p, const AdamCoefficients& c) {
  with_format(p.format, [&]<StateFormat format>(Format<format>) { numerics::adamw_range<format>(p, 0, p.count, c); });
}

void weights_of_master(const float* master, bf16* weight, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) weight[i] = numerics::weight_of_master(master[i]);
}

void accumulate(float* sum, const bf16* gradient, bool first, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    const float g = numerics::bf16_to_float(gradient[i]);
    sum[i] = first ? g : sum[i] + g;
  }
}

void round(const float* sum, bf16* gradient, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) gradient[i] = numerics::round_to_bf16(sum[i]);
}

void norm_blocks(const bf16* gradient, std::int64_t count, double* partial) {
  for (std::int64_t at = 0; at < count; at += layout_quantum) {
    partial[at / layout_quantum] = numerics::norm_block(gradient + at, std::min(layout_quantum, count - at));
  }
}

}  // namespace tandem::reference
