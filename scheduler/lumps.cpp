#include "scheduler/lumps.hpp"

#include <algorithm>
#include <utility>
#include <vector>

namespace tandem {

Accumulation in_lumps(const Accumulation& whole, int most) noexcept {
  const int at_once = std::min(whole.at_once, whole.passes() == 1 ? most : micro_batches_of_rates);
  return {(whole.passes() - 1) * at_once + std::min(whole.in_last_pass(), at_once), at_once};
}

Plan in_lumps(const ParameterLayout& layout, Plan plan, std::int64_t lumps) {
  const std::int64_t most = std::max(plan.subgroup_size, layout.state_elements() / lumps);
  std::vector<Subgroup> merged;
  for (const Subgroup& s : plan.subgroups) {
    Subgroup* last = merged.empty() ? nullptr : &merged.back();
    const bool alike = last != nullptr && last->layer == s.layer && last->path() == s.path() &&
                       last->gradient_on_device == s.gradient_on_device;
    if (alike && s.end - last->begin <= most) {
      last->end = s.end;
    } else {
      merged.push_back(s);
    }
  }
  plan.subgroups = std::move(merged);
  // As much memory for what is on its way would be fewer buffers; fewer than three slow what streams.
  constexpr int fewest_buffers = 3;
  const auto larger = static_cast<int>(std::min<std::int64_t>(most / plan.piece_elements, lumps));
  for (int* buffers : {&plan.staging_pieces, &plan.state_buffers}) {
    *buffers = std::max(std::min(*buffers, fewest_buffers), *buffers / larger);
  }
  plan.piece_elements = most;
  return plan;
}

}  // namespace tandem
