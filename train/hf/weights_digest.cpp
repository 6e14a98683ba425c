#include "train/hf/weights_digest.hpp"

#include <algorithm>
#include <span>
#include <vector>

#include "core/base/hash128.hpp"
#include "models/transformer/transformer.hpp"

namespace tandem {
namespace {

/// Adapters of one value count by different factors.
void add_factors(const LoraConfig& lora, Hash128& hash) {
  for (const std::vector<LoraModule>& block : lora.modules) {
    for (const LoraModule& module : block) {
      const double factor = lora.scale(module);
      hash.add(module.name.data(), module.name.size());
      hash.add(&factor, sizeof factor);
    }
  }
}

}  // namespace

std::string weights_digest(const ModelSource& source, const ParameterLayout& layout, std::uint64_t seed,
                           Parallel* threads) {
  constexpr std::int64_t piece = std::int64_t{1} << 20;
  const ParameterValues values = initial_values(source, layout, seed, threads);
  std::vector<float> room(static_cast<std::size_t>(piece));
  Hash128 hash;
  for (const Parameter* parameter : layout.owned_parameters()) {
    hash.add(parameter->full_name.data(), parameter->full_name.size());
    hash.add(&parameter->count, sizeof parameter->count);
    for (std::int64_t first = 0; first < parameter->count; first += piece) {
      const auto count = static_cast<std::size_t>(std::min(piece, parameter->count - first));
      const auto part = std::span(room).first(count);
      values(*parameter, first, part);
      hash.add(part.data(), part.size_bytes());
    }
  }
  const auto adapts = [](const Parameter* p) { return is_adapter(*p); };
  if (source.config.lora && std::ranges::any_of(layout.owned_parameters(), adapts)) {
    add_factors(*source.config.lora, hash);
  }
  return hash.text();
}

}  // namespace tandem
