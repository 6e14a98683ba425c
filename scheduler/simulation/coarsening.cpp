#include "scheduler/simulation/coarsening.hpp"

#include <algorithm>
#include <utility>
#include <vector>

namespace tandem {

Accumulation coarsened(const Accumulation& whole, int most) noexcept {
  const int at_once = std::min(whole.at_once, whole.passes() == 1 ? most : micro_batches_of_rates);
  return {(whole.passes() - 1) * at_once + std::min(whole.in_last_pass(), at_once), at_once};
}

namespace {

/// Subgroups of `plan`, where in each window of up to `most` elements of a layer those on the same path are merged into
/// one.
std::vector<Subgroup> merged(const Plan& plan, std::int64_t most) {
  std::vector<Subgroup> all;
  std::size_t window = 0;  // its first in `all`
  for (const Subgroup& s : plan.subgroups) {
    const bool opens = all.empty() || all[window].layer != s.layer || s.end - all[window].begin > most;
    if (opens) window = all.size();
    const auto alike =
        std::find_if(all.begin() + static_cast<std::ptrdiff_t>(window), all.end(), [&](const Subgroup& a) {
          return a.path() == s.path() && a.tier == s.tier && a.gradient_on_device == s.gradient_on_device &&
                 a.speculates == s.speculates;
        });
    if (alike == all.end()) {
      all.push_back(s);
      continue;
    }
    // The subgroups behind it move on; their order does not matter.
    alike->end += s.count();
    for (auto later = alike + 1; later != all.end(); ++later) {
      later->begin += s.count();
      later->end += s.count();
    }
  }
  return all;
}

}  // namespace

Plan coarsened(const ParameterLayout& layout, Plan plan, std::int64_t coarse_pieces) {
  const std::int64_t most = std::max(plan.subgroup_size, layout.state_elements() / coarse_pieces);
  plan.subgroups = merged(plan, most);
  // Fewest buffers of coarse pieces: the same memory would hold fewer, but fewer than three slow down streaming.
  constexpr int fewest_buffers = 3;
  const auto larger = static_cast<int>(std::min<std::int64_t>(most / plan.piece_elements, coarse_pieces));
  for (int* buffers : {&plan.staging_pieces, &plan.state_buffers}) {
    *buffers = std::max(std::min(*buffers, fewest_buffers), *buffers / larger);
  }
  // From a file through the device each is in five places, one after another.
  constexpr int fewest_file_buffers = 5;
  plan.file_buffers = std::max(std::min(plan.file_buffers, fewest_file_buffers), plan.file_buffers / larger);
  plan.piece_elements = most;
  return plan;
}

}  // namespace tandem
