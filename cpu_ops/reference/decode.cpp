#include "core/numerics/weight_codes.hpp"
#include "core/tensor/coded_shape.hpp"
#include "cpu_ops/reference/reference.hpp"

namespace tandem::reference {

void decode(const CodedWeight& from, TensorView weight) {
  const CodedShape shape = coded_shape(weight.shape);
  const numerics::Nf4Scales blocks = numerics::nf4_scales(from.code, shape, from.scales);
  for (std::int64_t i = 0; i < shape.count(); ++i) {
    const std::int64_t scale = numerics::scale_run(from.code, shape, i).scale;
    float value = 0.0F;
    if (from.code == WeightCode::int8) {
      value = numerics::int8_value(static_cast<std::int8_t>(from.codes[i]), from.scales[scale]);
    } else if (from.code == WeightCode::fp8) {
      value = numerics::fp8_value(static_cast<std::uint32_t>(from.codes[i]), from.scales[scale]);
    } else {
      value = numerics::nf4_value(numerics::nf4_code_at(from.codes, i), numerics::absmax_of(blocks, scale));
    }
    weight.as<bf16>()[i] = numerics::round_to_bf16(value);
  }
}

}  // namespace tandem::reference
