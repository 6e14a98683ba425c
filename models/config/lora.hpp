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

/// An adapter of a module of a block.
struct LoraModule {
  std::string name;       ///< within its block, as AdapterModule has it: "self_attn.q_proj"
  std::int64_t rank = 0;  ///< r
  double alpha = 0.0;
  /// Whether files have a module for each expert, not one parameter of all.
  bool each_expert = false;
  bool operator==(const LoraModule&) const = default;
};

/// Adapters of a model.
struct LoraConfig {
  std::int64_t rank = 0;         ///< r of modules that have no other
  double alpha = 0.0;            ///< alpha of those
  bool rank_stabilized = false;  ///< scale = alpha / sqrt(r) (Kalajdzievski, arXiv 2312.03732), not alpha / r
  double dropout = 0.0;          ///< share of the elements of x that A does not see in training
  std::uint64_t seed = 0;        ///< seed of dropout
  std::vector<std::vector<LoraModule>> modules{};  ///< modules of each block that have adapters

  double scale(const LoraModule& module) const noexcept {
    const auto r = static_cast<double>(module.rank);
    return module.alpha / (rank_stabilized ? std::sqrt(r) : r);
  }
  /// The adapter of a module of a block, or null.
  const LoraModule* find(std::int64_t block, std::string_view module) const {
    const std::vector<LoraModule>& of_block = modules.at(static_cast<std::size_t>(block));
    const auto found = std::ranges::find(of_block, module, &LoraModule::name);
    return found == of_block.end() ? nullptr : &*found;
  }
  bool adapts(std::int64_t block, std::string_view module) const { return find(block, module) != nullptr; }
  /// Largest rank that the module has in any block; 0: no adapter.
  std::int64_t largest_rank(std::string_view module) const {
    std::int64_t largest = 0;
    for (const auto& of_block : modules) {
      const auto found = std::ranges::find(of_block, module, &LoraModule::name);
      if (found != of_block.end()) largest = std::max(largest, found->rank);
    }
    return largest;
  }
  /// Gives each of these modules of a block an adapter of rank and alpha as above.
  void adapt(std::size_t block, const std::vector<std::string>& names) {
    if (modules.size() <= block) modules.resize(block + 1);
    for (const std::string& name : names) modules[block].push_back({name, rank, alpha});
  }
};

}  // namespace tandem
