#pragma once
// Low-rank adapters (Hu et al., LoRA, arXiv 2106.09685): y = x W^T + scale (x A^T) B^T, with W frozen, A (r, I) and
// B (O, r) trained.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tandem {

/// End of the name of a module's matrix A, and of B, which lies transposed, as (r, O): then its products are those of
/// other linear layers.
constexpr std::string_view lora_a = ".lora_A.weight", lora_b = ".lora_B.weight";

/// Adapters of a model.
struct LoraConfig {
  std::int64_t rank = 0;  ///< r
  double alpha = 0.0;
  bool rank_stabilized = false;  ///< scale = alpha / sqrt(r) (Kalajdzievski, arXiv 2312.03732), not alpha / r
  double dropout = 0.0;          ///< share of the elements of x that A does not see in training
  std::uint64_t seed = 0;        ///< seed of dropout
  /// Linear layers of each block that have an adapter, by their names within it: "self_attn.q_proj".
  std::vector<std::vector<std::string>> modules{};

  double scale() const noexcept {
    const auto r = static_cast<double>(rank);
    return alpha / (rank_stabilized ? std::sqrt(r) : r);
  }
  bool adapts(std::int64_t block, std::string_view module) const {
    const std::vector<std::string>& of_block = modules.at(static_cast<std::size_t>(block));
    return std::ranges::find(of_block, module) != of_block.end();
  }
  /// Whether it adapts that layer of some block.
  bool adapts_any(std::string_view module) const {
    return std::ranges::any_of(modules,
                               [&](const auto& names) { return std::ranges::find(names, module) != names.end(); });
  }
};

}  // namespace tandem
