#include "scheduler/search/division_search.hpp"

#include <algorithm>
#include <array>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "scheduler/machine/cost_model.hpp"

namespace tandem {
namespace {

// Simulated tasks that a search may spend, and what it may have spent before it changes single subgroups.
constexpr std::int64_t task_budget = 1'500'000;
constexpr std::int64_t task_budget_of_shares = 750'000;
// Simulated tasks that a search with many subgroups may spend on looking for a division.
constexpr std::int64_t task_budget_of_many = 1'500'000;

constexpr std::array everywhere{Residents::last, Residents::first, Residents::spread};

struct Trial {
  Division division;
  double seconds = 0.0;
};

}  // namespace

void DivisionSearch::run() {
  const double least = seconds_of_step(in_.compute, in_.options.max_micro_batches) + in_.profile.step_overhead.value;
  enough_ = (1.0 + as_good_as_any) * least;
  allowance_ = trials_.few() ? task_budget_of_shares : trials_.spent() + task_budget_of_many;
  try_shares();
  try_threads();
  if (trials_.few()) return wander_from_all();
  refine(division_of(trials_.best()), trials_.best_seconds());  // with their number
}

double DivisionSearch::seconds_of(const Division& division, double limit) {
  const Plan& best = trials_.best();
  return trials_.seconds_with({paths_of(division, best.subgroups.size()), best.update_threads}, limit);
}

/// How many subgroups can stay on the device where of the others this share is streamed.
std::size_t DivisionSearch::most_residents(double streamed_share) {
  std::size_t low = 0;
  std::size_t high = trials_.best().subgroups.size();
  OffloadOptions options = in_.options;
  options.policy = Policy::static_share(0.0);
  while (low < high) {
    const std::size_t middle = (low + high + 1) / 2;
    options.paths = paths_of({middle, streamed_share, Residents::last}, trials_.best().subgroups.size());
    if (trials_.plan(options)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

/// Tries divisions by share: the subgroups that are not resident all on the CPU, all streamed, or divided by the closed
/// form; with each as many residents as fit, and fewer, since the room they leave may be worth more to weights. The
/// search goes on several times, from the best of these and of the policies: local optima lie between.
void DivisionSearch::try_shares() {
  constexpr std::size_t starts = 5;
  const MachineProfile profile = in_format(in_.profile, in_.options.state);
  closed_form_cpu_share_ = best_cpu_share(profile, {.weights_resident = trials_.best().layers.back().resident,
                                                    .gradient_on_device = true,
                                                    .cpu_kernel_bytes = profile.cpu_update_bytes.value,
                                                    .state = in_.options.state});
  std::vector<Trial> trials;
  std::set<Division> known;
  const auto attempt = [&](const Division& division) {
    if (may_go_on() && known.insert(division).second) {
      trials.push_back({division, seconds_of(division, worth_knowing * trials_.best_seconds())});
    }
  };
  for (const Fitting& policy : trials_.fastest_policies(starts)) attempt(division_of(*policy.plan));
  for (const double streamed : {1.0 - closed_form_cpu_share_, 0.0, 1.0}) {
    constexpr std::size_t steps = 8;
    const std::size_t most = most_residents(streamed);
    for (std::size_t fewer = 0; fewer <= steps; ++fewer) {
      attempt({most - most * fewer * fewer / (steps * steps), streamed, Residents::last});
    }
  }
  std::stable_sort(trials.begin(), trials.end(), [](const Trial& a, const Trial& b) { return a.seconds < b.seconds; });
  trials.resize(std::min(trials.size(), starts));
  for (const Trial& trial : trials) refine(trial.division, trial.seconds);
}

/// Residents elsewhere, a step more or fewer of them, a step more or less streamed; and the steps halved where none
/// helps.
void DivisionSearch::refine(const Division& division, double seconds) {
  constexpr double finest = 0.004;
  Trial best{division, seconds};
  const std::size_t subgroups = trials_.best().subgroups.size();
  double share = 0.15;
  auto count = static_cast<std::int64_t>(std::max<std::size_t>(1, subgroups / 16));
  const auto improves = [&](const Division& next) {
    const double took = seconds_of(next, best.seconds);
    if (took >= best.seconds * (1.0 - worthwhile)) return false;
    best = {next, took};
    return true;
  };
  while (share > finest && may_go_on()) {
    bool better = false;
    for (const Residents where : everywhere) {
      if (where != best.division.where)
        better |= improves({best.division.residents, best.division.streamed_share, where});
    }
    for (const std::int64_t residents : {std::int64_t{0}, count, -count}) {
      for (const double streamed : {0.0, share, -share}) {
        if (residents == 0 && streamed == 0.0) continue;
        const std::int64_t moved =
            std::max<std::int64_t>(0, static_cast<std::int64_t>(best.division.residents) + residents);
        better |= improves({std::min(static_cast<std::size_t>(moved), subgroups),
                            std::clamp(best.division.streamed_share + streamed, 0.0, 1.0), best.division.where});
      }
    }
    if (better) continue;
    share /= 2.0;
    count = std::max<std::int64_t>(1, count / 2);
  }
}

/// Threads of the CPU's update, which the search may vary; 0 where their number is the caller's, or where none is to
/// spare.
int DivisionSearch::threads_to_try() const {
  constexpr int enough = 4;
  const auto all = static_cast<int>(in_.profile.cpu_update_cores.value);
  return in_.options.update_threads || all < enough ? 0 : all;
}

/// Tries fewer threads for the CPU's update of the same division: where DRAM is full, the bandwidth that they leave
/// over goes to copies.
void DivisionSearch::try_threads() {
  constexpr int parts = 8;
  const int all = threads_to_try();
  if (all == 0 || trials_.best().shares().cpu == 0) return;
  Setting setting = setting_of(trials_.best());
  for (int part = parts - 1; part >= parts / 2 && may_go_on(); --part) {
    setting.update_threads = all * part / parts;
    trials_.seconds_with(setting, trials_.best_seconds());
  }
}

/// Starts of the search. From one good division to another many subgroups may have to change at once: what streams no
/// state needs no buffers for it, and each layer whose state stays takes the room of several whose weights do. So from
/// the best of either kind and from the best policies.
std::vector<Start> DivisionSearch::where_to_start() {
  constexpr std::size_t policies = 4;
  std::vector<Start> starts;
  for (const Fitting& f : trials_.fastest_policies(policies)) starts.push_back({setting_of(*f.plan), f.seconds()});
  for (const Start& best : trials_.best_of_kind()) {
    if (!best.setting.paths.empty()) starts.push_back(best);
  }
  return starts;
}

/// Threshold accepting (Dueck and Scheuer, J. Comput. Phys. 90, 1990): goes on from what is slower by less than a
/// threshold that falls to nothing, so that it does not end on the first hill. A simulation may give up beyond it.
/// Returns the best that it came by.
Start DivisionSearch::wander(Start start, double first_threshold, std::int64_t tasks) {
  constexpr std::size_t tries_of_each = 300;
  const std::size_t tries = tries_of_each * start.setting.paths.size();
  const std::int64_t begun = trials_.spent();
  allowance_ = begun + tasks;
  std::mt19937_64 random;  // seeded alike in every search
  const int threads = threads_to_try();
  Start current = start;
  std::set<Setting> seen{current.setting};
  for (std::size_t i = 0; i < tries && may_go_on(); ++i) {
    Setting next = current.setting;
    change(next, threads, random);
    if (!seen.insert(next).second) continue;
    const double spent = std::max(static_cast<double>(i) / static_cast<double>(tries),
                                  static_cast<double>(trials_.spent() - begun) / static_cast<double>(tasks));
    const double limit = current.seconds * (1.0 + first_threshold * (1.0 - spent) * (1.0 - spent));
    const double seconds = trials_.seconds_with(next, limit);
    if (seconds > limit) continue;
    current = {std::move(next), seconds};
    if (seconds < start.seconds) start = current;
  }
  return start;
}

/// A little from each start, and on from where that led to the best.
void DivisionSearch::wander_from_all() {
  constexpr double little = 0.002;
  constexpr double more = 0.006;
  std::vector<Start> starts = where_to_start();
  const auto left = [&] { return std::max<std::int64_t>(0, task_budget - trials_.spent()); };
  const std::int64_t tasks = left() / (2 * static_cast<std::int64_t>(starts.size()));
  for (Start& start : starts) start = wander(std::move(start), little, tasks);
  const auto best = std::min_element(starts.begin(), starts.end(),
                                     [](const Start& a, const Start& b) { return a.seconds < b.seconds; });
  wander(std::move(*best), more, left());
}

}  // namespace tandem
