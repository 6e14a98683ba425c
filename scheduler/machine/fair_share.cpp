#include "scheduler/machine/fair_share.hpp"

#include <algorithm>

namespace tandem {

void fair_speeds(std::span<const TaskCost* const> costs, std::span<double> speeds) {
  constexpr double undecided = -1.0;
  std::fill(speeds.begin(), speeds.end(), undecided);
  ResourceShares fixed{};  // share of each resource that tasks with a decided speed use
  std::size_t left = costs.size();
  while (left > 0) {
    ResourceShares rising{};
    for (std::size_t i = 0; i < costs.size(); ++i) {
      if (speeds[i] >= 0.0) continue;
      for (std::size_t r = 0; r < rising.size(); ++r) rising[r] += costs[i]->share[r];
    }
    double level = 1.0;
    std::size_t full = rising.size();  // none: nothing stops the rest
    for (std::size_t r = 0; r < rising.size(); ++r) {
      if (rising[r] <= 0.0) continue;
      const double reached = std::max(0.0, (1.0 - fixed[r]) / rising[r]);
      if (reached < level) {
        level = reached;
        full = r;
      }
    }
    for (std::size_t i = 0; i < costs.size(); ++i) {
      if (speeds[i] >= 0.0 || (full < rising.size() && costs[i]->share[full] <= 0.0)) continue;
      speeds[i] = level;
      --left;
      for (std::size_t r = 0; r < fixed.size(); ++r) fixed[r] += level * costs[i]->share[r];
    }
  }
}

}  // namespace tandem
