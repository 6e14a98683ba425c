#include <algorithm>

#include "core/numerics/norm_block.hpp"
#include "cpu_ops/reference/reference.hpp"

namespace tandem::reference {

void adamw(const AdamPiece& p, const AdamCoefficients& c) {
  with_format(p.format, [&]<StateFormat format>(Format<format>) { numerics::update_range<format>(p, 0, p.count, c); });
}

void weights_of_master(const float* master, bf16* weight, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) weight[i] = numerics::weight_of_master(master[i]);
}

template <class T>
void accumulate(float* sum, const T* gradient, bool first, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    const float g = numerics::widened(gradient[i]);
    sum[i] = first ? g : sum[i] + g;
  }
}
template void accumulate(float*, const bf16*, bool, std::int64_t);
template void accumulate(float*, const float*, bool, std::int64_t);

void round(const float* sum, bf16* gradient, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) gradient[i] = numerics::round_to_bf16(sum[i]);
}

template <class T>
void norm_blocks(const T* gradient, std::int64_t count, double* partial) {
  for (std::int64_t at = 0; at < count; at += layout_quantum) {
    partial[at / layout_quantum] = numerics::norm_block(gradient + at, std::min(layout_quantum, count - at));
  }
}
template void norm_blocks(const bf16*, std::int64_t, double*);
template void norm_blocks(const float*, std::int64_t, double*);

}  // namespace tandem::reference
