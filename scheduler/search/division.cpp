#include "scheduler/search/division.hpp"

#include <array>
#include <utility>

namespace tandem {
namespace {

// One change in so many is of the CPU's threads.
constexpr std::size_t threads_once_in = 24;
constexpr std::array all_paths{UpdatePath::cpu, UpdatePath::streamed, UpdatePath::resident};

/// Whether subgroup `i` of `n` stays.
bool stays(const Division& d, std::size_t i, std::size_t n) {
  switch (d.where) {
    case Residents::last:
      return i + d.residents >= n;
    case Residents::first:
      return i < d.residents;
    case Residents::spread:
      break;
  }
  return i * d.residents / n != (i + 1) * d.residents / n;
}

}  // namespace

Division division_of(const Plan& plan) {
  Division division;
  std::size_t streamed = 0;
  for (const Subgroup& s : plan.subgroups) {
    if (s.path() == UpdatePath::resident) ++division.residents;
    if (s.path() == UpdatePath::streamed) ++streamed;
  }
  const std::size_t others = plan.subgroups.size() - division.residents;
  if (others > 0) division.streamed_share = static_cast<double>(streamed) / static_cast<double>(others);
  return division;
}

std::vector<UpdatePath> paths_of(const Division& division, std::size_t subgroups) {
  std::vector<UpdatePath> paths(subgroups, UpdatePath::resident);
  double owed = 0.0;
  for (std::size_t i = 0; i < subgroups; ++i) {
    if (stays(division, i, subgroups)) continue;
    owed += division.streamed_share;
    paths[i] = owed >= 0.5 ? UpdatePath::streamed : UpdatePath::cpu;
    if (owed >= 0.5) owed -= 1.0;
  }
  return paths;
}

Setting setting_of(const Plan& plan) {
  Setting setting{.paths = {}, .update_threads = plan.update_threads};
  for (const Subgroup& s : plan.subgroups) setting.paths.push_back(s.path());
  return setting;
}

void change(Setting& setting, int threads, std::mt19937_64& random) {
  const auto any = [&random](std::size_t of) { return static_cast<std::size_t>(random() % of); };
  if (threads > 0 && any(threads_once_in) == 0) {
    const std::size_t fewer = any(static_cast<std::size_t>(threads - threads / 4));
    setting.update_threads = fewer == 0 ? 0 : threads - static_cast<int>(fewer);
    return;
  }
  std::vector<UpdatePath>& paths = setting.paths;
  const std::size_t kind = any(4);
  UpdatePath& one = paths[any(paths.size())];
  UpdatePath& other = paths[any(paths.size())];
  if (kind < 2) return std::swap(one, other);
  one = all_paths[any(all_paths.size())];
  if (kind == 2) other = all_paths[any(all_paths.size())];
}

}  // namespace tandem
