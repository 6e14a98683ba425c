#include "models/transformer/reference_adapters.hpp"

#include <algorithm>

#include "core/base/error.hpp"
#include "models/transformer/transformer.hpp"

namespace tandem {

ReferenceAdapters::ReferenceAdapters(const ModelConfig& config, Carver& carver)
    : blocks_(static_cast<std::size_t>(config.layers)) {
  const ParameterLayout layout = layout_of(config);
  for (const Parameter* p : layout.owned_parameters()) {
    if (!is_adapter(*p)) continue;
    blocks_[static_cast<std::size_t>(p->layer) - 1].push_back(
        {p->name, p->full_name, carver.take(DType::bf16, p->shape)});
  }
}

TensorView ReferenceAdapters::matrix(std::int64_t block, std::string_view name) const {
  const std::vector<Matrix>& own = blocks_.at(static_cast<std::size_t>(block));
  const auto found = std::ranges::find(own, name, &Matrix::name);
  if (found == own.end()) throw MisuseError("no adapter of the reference", std::string(name));
  return found->values;
}

}  // namespace tandem
