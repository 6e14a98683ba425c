#include "train/hf/weights_digest.hpp"

#include <algorithm>
#include <span>
#include <vector>

#include "core/base/hash128.hpp"

namespace tandem {

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
  return hash.text();
}

}  // namespace tandem
