#include "offload/engine/gradient_norm.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>

namespace tandem {

double GradientNorm::wait() {
  squares_.assign(parts_.layout.layers().size(), 0.0);
  std::span<const TaskId> tasks = parts_.lowering->norm_tasks();
  std::size_t begin = 0;
  for (const auto& [layer, end] : parts_.lowering->complete_layers()) {
    parts_.executor.wait_done(tasks.subspan(begin, end - begin), "waiting for gradients");
    squares_[layer] = squares_of(layer);
    begin = end;
  }
  return std::sqrt(std::accumulate(squares_.begin(), squares_.end(), 0.0));
}

/// A layer's blocks in order, whatever subgroups they lie in, and whichever ranks have them: each goes on from the sum
/// of those before it.
double GradientNorm::squares_of(LayerIndex layer) {
  Group* const group = parts_.group;
  if (group == nullptr) return add_squares(layer, 0.0);
  double sum = 0.0;
  parts_.for_all_ranks([&] {
    for (int rank = 0; rank < group->rank().count; ++rank) {
      if (rank == group->rank().index) sum = add_squares(layer, sum);
      group->broadcast(Channel::engine, rank, std::as_writable_bytes(std::span(&sum, 1)));
    }
  });
  return sum;
}

double GradientNorm::add_squares(LayerIndex layer, double sum) const {
  const auto& all = parts_.plan.subgroups;
  const auto first = std::ranges::lower_bound(all, layer.number(), {}, &Subgroup::layer);
  const auto last = std::ranges::upper_bound(first, all.end(), layer.number(), {}, &Subgroup::layer);
  for (auto subgroup = first; subgroup != last; ++subgroup) {
    const double* norms = parts_.storage.subgroup(SubgroupIndex(static_cast<int>(subgroup - all.begin()))).host_norm;
    const std::int64_t blocks = subgroup->count() / layout_quantum;
    for (std::int64_t b = 0; b < blocks; ++b) sum += norms[b];
  }
  return sum;
}

}  // namespace tandem
