#include "core/numerics/dropout.hpp"

#include "cpu_ops/reference/element_access.hpp"
#include "cpu_ops/reference/reference.hpp"

namespace tandem::reference {

void dropout(TensorView x, const Dropout& of, TensorView y, bool accumulate) {
  const numerics::DropoutRule rule = numerics::dropout_rule(of.rate);
  for (std::int64_t i = 0; i < x.count(); ++i) {
    const std::uint64_t number = of.first + static_cast<std::uint64_t>(i);
    const auto bits = numerics::dropout_bits(of.seed, of.stream, number / numerics::dropout_block);
    const float value =
        numerics::dropped(static_cast<float>(get(x, i)), bits.word[number % numerics::dropout_block], rule);
    const float before = accumulate ? static_cast<float>(get(y, i)) : 0.0F;
    put(y, i, static_cast<double>(accumulate ? numerics::add(before, value) : value));
  }
}

}  // namespace tandem::reference
