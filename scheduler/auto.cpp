#include "scheduler/auto.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>

#include "core/error.hpp"

namespace tandem {
namespace {

// Simulated tasks that a search may spend.
constexpr std::int64_t task_budget = 1'500'000;
// Beyond this many subgroups, single ones do not matter and pieces are simulated in lumps.
constexpr std::size_t few_subgroups = 48;
constexpr std::size_t pairs_up_to = 8;
constexpr std::size_t climbs = 4;
// Pieces of a plan that a search simulates one by one.
constexpr std::int64_t many_pieces = 2000;
// Where subgroups that stay on the device lie among the others: updates run in forward order.
enum class Residents : std::uint8_t { last, first, spread };
constexpr std::array everywhere{Residents::last, Residents::first, Residents::spread};

/// So many subgroups resident; of the others this share streamed, spread evenly, so that CPU and device both always
/// have work.
struct Division {
  std::size_t residents = 0;
  double streamed_share = 0.0;
  Residents where = Residents::last;
};
constexpr double worthwhile = 1e-6;  // relative gain below which a change is noise

std::vector<UpdatePath> paths_of(const Plan& plan) {
  std::vector<UpdatePath> paths;
  for (const Subgroup& s : plan.subgroups) paths.push_back(s.path());
  return paths;
}

std::vector<std::string> fixed_policies() {
  std::vector<std::string> policies{"device", "host", "stream"};
  for (int tenths = 0; tenths < 10; ++tenths) policies.push_back(fmt::format("static:{}", tenths / 10.0));
  for (const int stride : {2, 3, 4, 5, 8}) {
    policies.push_back(fmt::format("interleave:{}", stride));
    for (int tenths = 1; tenths < 10; ++tenths) {
      policies.push_back(fmt::format("interleave:{},resident={}", stride, tenths / 10.0));
    }
  }
  return policies;
}

class Search {
 public:
  Search(const ParameterLayout& layout, const OffloadOptions& options, const PlanningFacts& facts,
         const MachineProfile& profile, std::span<const LayerSeconds> compute, const Plan* present)
      : layout_(layout), options_(options), facts_(facts), profile_(profile), compute_(compute), present_(present) {}

  Choice run();

 private:
  std::optional<Plan> plan(const OffloadOptions& options) const;
  Simulation exactly(const Plan& plan) const;
  double quickly(const Plan& plan);
  void try_fixed();
  void consider(const Policy& policy, std::optional<Plan> made);
  void improve();
  double seconds_with(const std::vector<UpdatePath>& paths);
  bool attempt(const std::vector<UpdatePath>& paths);
  void try_shares();
  bool try_swaps();
  void try_changes();
  void finish();
  std::vector<UpdatePath> divided(const Division& division) const;
  void refine(Division division, double least);
  bool may_spend() const { return spent_ < allowance_; }

  const ParameterLayout& layout_;
  const OffloadOptions& options_;
  const PlanningFacts& facts_;
  const MachineProfile& profile_;
  std::span<const LayerSeconds> compute_;
  const Plan* present_;

  std::vector<Plan> fitting_;  ///< of `choice_.candidates` that fit, in their order
  Choice choice_;
  std::optional<Plan> best_;
  double best_seconds_ = 0.0;  ///< as `quickly` has it
  bool improved_ = false;
  std::int64_t spent_ = 0;
  std::int64_t allowance_ = task_budget;  ///< of what is searched at the moment
};

std::optional<Plan> Search::plan(const OffloadOptions& options) const {
  try {
    return make_plan(layout_, options, facts_);
  } catch (const PlanError&) {
    return std::nullopt;
  }
}

Simulation Search::exactly(const Plan& plan) const {
  return simulate(layout_, plan, profile_, compute_, {.micro_batches = options_.max_micro_batches});
}

/// Pieces in lumps where there are many: their number is what a simulation costs, their size hardly matters.
double Search::quickly(const Plan& plan) {
  Plan lumped = plan;
  const std::int64_t least = layout_.state_elements() / many_pieces;
  while (lumped.piece_elements < std::min(least, plan.subgroup_size)) lumped.piece_elements *= 2;
  lumped.piece_elements = std::min(lumped.piece_elements, plan.subgroup_size);
  const Simulation s = exactly(lumped);
  spent_ += s.tasks;
  return s.step_seconds;
}

void Search::try_fixed() {
  std::vector<std::string> policies{options_.policy.text()};
  if (options_.policy.kind == Policy::Kind::automatic) policies = fixed_policies();
  // First, so that another takes its place only where it is faster.
  if (present_ != nullptr) consider(present_->policy, *present_);
  for (const std::string& text : policies) {
    OffloadOptions fixed = options_;
    fixed.policy = parse_policy(text);
    const bool contradicts = fixed.policy.kind == Policy::Kind::device && options_.resident_layers >= 0 &&
                             options_.resident_layers < layout_.layer_count();
    consider(fixed.policy, contradicts ? std::nullopt : plan(fixed));
  }
}

void Search::consider(const Policy& policy, std::optional<Plan> made) {
  Candidate candidate;
  candidate.policy = policy;
  if (made) {
    candidate.fits = true;
    candidate.shares = made->shares();
    candidate.device_bytes = made->memory.device_bytes();
    const double seconds = quickly(*made);
    candidate.simulation.step_seconds = seconds;
    if (!best_ || seconds < best_seconds_) {
      best_ = *made;
      best_seconds_ = seconds;
    }
    fitting_.push_back(*std::move(made));
  }
  choice_.candidates.push_back(std::move(candidate));
}

/// Infinite where it does not fit. Keeps the plan where it is the best so far.
double Search::seconds_with(const std::vector<UpdatePath>& paths) {
  OffloadOptions options = options_;
  options.policy = best_->policy;
  options.paths = paths;
  // `device` means every layer resident: with state elsewhere it is another policy.
  if (options.policy.kind == Policy::Kind::device) options.policy = parse_policy("static:0");
  std::optional<Plan> made = plan(options);
  if (!made) return std::numeric_limits<double>::infinity();
  const double seconds = quickly(*made);
  if (seconds < best_seconds_ * (1.0 - worthwhile)) {
    best_ = std::move(made);
    best_seconds_ = seconds;
    improved_ = true;
  }
  return seconds;
}

/// Whether it is better than the best so far.
bool Search::attempt(const std::vector<UpdatePath>& paths) {
  const double before = best_seconds_;
  seconds_with(paths);
  return best_seconds_ < before;
}

std::vector<UpdatePath> Search::divided(const Division& d) const {
  std::vector<UpdatePath> paths(best_->subgroups.size(), UpdatePath::resident);
  const std::size_t n = paths.size();
  double owed = 0.0;
  for (std::size_t i = 0; i < n; ++i) {
    const bool stays = d.where == Residents::last    ? i + d.residents >= n
                       : d.where == Residents::first ? i < d.residents
                                                     : i * d.residents / n != (i + 1) * d.residents / n;
    if (stays) continue;
    owed += d.streamed_share;
    paths[i] = owed >= 0.5 ? UpdatePath::streamed : UpdatePath::cpu;
    if (owed >= 0.5) owed -= 1.0;
  }
  return paths;
}

/// Residents as they are and as many as fit, and shares around the closed form's.
void Search::try_shares() {
  const auto paths = paths_of(*best_);
  const auto resident = static_cast<std::size_t>(std::count(paths.begin(), paths.end(), UpdatePath::resident));
  const MachineProfile profile = in_format(profile_, options_.state);
  const PathSetting setting{.weights_resident = best_->layers.back().resident,
                            .gradient_on_device = true,
                            .cpu_kernel_bytes = profile.cpu_update_bytes.value,
                            .state = options_.state};
  choice_.closed_form_cpu_share = best_cpu_share(profile, setting);
  const double streamed = 1.0 - choice_.closed_form_cpu_share;
  std::size_t low = resident;
  std::size_t high = paths.size();
  OffloadOptions options = options_;
  options.policy = parse_policy("static:0");
  while (low < high) {
    const std::size_t middle = (low + high + 1) / 2;
    options.paths = divided({middle, streamed, Residents::last});
    if (plan(options)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  std::vector<std::size_t> counts{low, resident, (resident + low) / 2};
  std::sort(counts.begin(), counts.end(), std::greater<>());
  counts.erase(std::unique(counts.begin(), counts.end()), counts.end());
  for (const std::size_t count : counts) {
    Division best{count, streamed, Residents::last};
    double least = std::numeric_limits<double>::infinity();
    const auto consider = [&](const Division& division) {
      const double seconds = may_spend() ? seconds_with(divided(division)) : least;
      if (seconds < least) best = division;
      least = std::min(least, seconds);
    };
    for (const Residents where : everywhere) consider({count, streamed, where});
    for (const double offset : {-0.35, -0.15, 0.15, 0.35}) {
      consider({count, std::clamp(streamed + offset, 0.0, 1.0), best.where});
    }
    refine(best, least);
  }
}

/// A step more or fewer of each, and the steps halved where none helps.
void Search::refine(Division division, double least) {
  constexpr double finest = 0.004;
  double share = 0.1;
  auto count = static_cast<std::int64_t>(std::max<std::size_t>(1, best_->subgroups.size() / 16));
  while (share > finest && may_spend()) {
    bool better = false;
    for (const std::int64_t residents : {std::int64_t{0}, count, -count}) {
      for (const double streamed : {0.0, share, -share}) {
        if (residents == 0 && streamed == 0.0) continue;
        const std::int64_t moved = std::max<std::int64_t>(0, static_cast<std::int64_t>(division.residents) + residents);
        const Division next{std::min(static_cast<std::size_t>(moved), best_->subgroups.size()),
                            std::clamp(division.streamed_share + streamed, 0.0, 1.0), division.where};
        const double seconds = seconds_with(divided(next));
        if (seconds >= least * (1.0 - worthwhile)) continue;
        division = next;
        least = seconds;
        better = true;
      }
    }
    if (better) continue;
    share /= 2.0;
    count = std::max<std::int64_t>(1, count / 2);
  }
}

/// Where memory is full, no subgroup can become resident unless another leaves.
bool Search::try_swaps() {
  bool better = false;
  const std::size_t n = best_->subgroups.size();
  for (std::size_t distance = 1; distance < n; distance *= 2) {
    for (std::size_t i = 0; i + distance < n && may_spend(); ++i) {
      auto changed = paths_of(*best_);
      if (changed[i] == changed[i + distance]) continue;
      std::swap(changed[i], changed[i + distance]);
      better = attempt(changed) || better;
    }
  }
  return better;
}

/// One subgroup another way, then two at once, all pairs where there are few, until nothing helps.
void Search::try_changes() {
  constexpr std::array all{UpdatePath::cpu, UpdatePath::streamed, UpdatePath::resident};
  const std::size_t n = best_->subgroups.size();
  if (n > few_subgroups) return;
  bool better = true;
  while (better && may_spend()) {
    better = false;
    const auto from = paths_of(*best_);
    for (std::size_t i = 0; i < n && may_spend(); ++i) {
      for (const UpdatePath path : all) {
        auto changed = paths_of(*best_);
        if (changed[i] == path) continue;
        changed[i] = path;
        better = attempt(changed) || better;
      }
    }
    if (better) continue;
    if (n > pairs_up_to) {
      better = try_swaps();
      continue;
    }
    for (std::size_t i = 0; i < n && may_spend(); ++i) {
      for (std::size_t j = i + 1; j < n; ++j) {
        for (const UpdatePath a : all) {
          for (const UpdatePath b : all) {
            auto changed = paths_of(*best_);
            if (changed[i] == a || changed[j] == b) continue;
            changed[i] = a;
            changed[j] = b;
            better = attempt(changed) || better;
          }
        }
      }
    }
  }
}

/// From the best fixed policies with different divisions: a climb ends at the next hill, not at the highest.
void Search::improve() {
  if (options_.policy.kind != Policy::Kind::automatic || fitting_.empty()) return;
  std::vector<std::pair<double, const Plan*>> starts;
  std::size_t next = 0;
  for (const Candidate& candidate : choice_.candidates) {
    if (candidate.fits) starts.emplace_back(candidate.simulation.step_seconds, &fitting_[next++]);
  }
  std::stable_sort(starts.begin(), starts.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  allowance_ = spent_ + (task_budget - spent_) / 2;
  try_shares();
  const bool few = best_->subgroups.size() <= few_subgroups;
  std::vector<std::vector<UpdatePath>> climbed;
  const auto share_of_the_rest = [&] {
    return spent_ +
           std::max<std::int64_t>(0, task_budget - spent_) / static_cast<std::int64_t>(climbs + 1 - climbed.size());
  };
  Plan highest = *best_;
  double highest_seconds = best_seconds_;
  bool highest_improved = improved_;
  allowance_ = share_of_the_rest();
  try_changes();
  for (const auto& [seconds, plan] : starts) {
    if (best_seconds_ < highest_seconds) {
      highest = *best_;
      highest_seconds = best_seconds_;
      highest_improved = improved_;
    }
    if (!few || climbed.size() == climbs) break;
    auto paths = paths_of(*plan);
    if (std::find(climbed.begin(), climbed.end(), paths) != climbed.end()) continue;
    climbed.push_back(std::move(paths));
    best_ = *plan;
    best_seconds_ = seconds;
    improved_ = false;
    allowance_ = share_of_the_rest();
    try_changes();
  }
  if (highest_seconds < best_seconds_) {
    best_ = std::move(highest);
    best_seconds_ = highest_seconds;
    improved_ = highest_improved;
  }
}

/// Simulates piece by piece what was simulated in lumps: the found plan, and every policy close to it.
void Search::finish() {
  constexpr double close = 1.1;
  Simulation found = exactly(*best_);
  std::size_t plan = 0;
  for (Candidate& candidate : choice_.candidates) {
    if (!candidate.fits) continue;
    const Plan& made = fitting_[plan++];
    const bool lumped = made.subgroups.size() > few_subgroups;
    if (lumped && candidate.simulation.step_seconds > close * best_seconds_) continue;
    candidate.simulation = exactly(made);
    if (candidate.simulation.step_seconds < found.step_seconds) {
      found = candidate.simulation;
      best_ = made;
      improved_ = false;
    }
  }
  choice_.plan = *best_;
  choice_.simulation = found;
  choice_.plan.chosen_by_auto = options_.policy.kind == Policy::Kind::automatic;
  if (improved_) {
    choice_.candidates.push_back({best_->policy, true, true, best_->shares(), best_->memory.device_bytes(), found});
  }
  std::stable_sort(choice_.candidates.begin(), choice_.candidates.end(), [](const Candidate& a, const Candidate& b) {
    if (a.fits != b.fits) return a.fits;
    return a.simulation.step_seconds < b.simulation.step_seconds;
  });
}

Choice Search::run() {
  try_fixed();
  // The refusal of make_plan names what would fit.
  if (!best_) best_ = make_plan(layout_, options_, facts_);
  if (best_seconds_ == 0.0) best_seconds_ = quickly(*best_);
  improve();
  finish();
  return std::move(choice_);
}

}  // namespace

Choice choose_plan(const ParameterLayout& layout, const OffloadOptions& options, const PlanningFacts& facts,
                   const MachineProfile& profile, std::span<const LayerSeconds> compute, const Plan* present) {
  return Search(layout, options, facts, profile, compute, present).run();
}

std::vector<Upgrade> upgrades(const ParameterLayout& layout, const OffloadOptions& options, const PlanningFacts& facts,
                              const MachineProfile& profile, std::span<const LayerSeconds> compute,
                              const Plan& chosen) {
  std::vector<Upgrade> list;
  const auto consider = [&](std::string what, const OffloadOptions& o, const PlanningFacts& f, const MachineProfile& p,
                            std::span<const LayerSeconds> c) {
    list.push_back({std::move(what), choose_plan(layout, o, f, p, c, &chosen).simulation.step_seconds});
  };
  OffloadOptions roomy = options;
  PlanningFacts room = facts;
  // The caller's own share stays as it is: what is doubled is the whole card.
  roomy.device_memory *= 2;
  room.device_capacity *= 2;
  consider("twice the device memory", roomy, room, profile, compute);
  MachineProfile wide = profile;
  for (Figure* f : {&wide.to_device, &wide.to_host, &wide.both_ways}) f->value *= 2.0;
  consider("a link of twice the rate", options, facts, wide, compute);
  MachineProfile channels = profile;
  channels.dram.value *= 2.0;
  // The CPU update runs at DRAM's rate where that bounds it: more channels let it rise as far as its cores allow.
  consider("twice the DRAM bandwidth", options, facts, channels, compute);
  MachineProfile cores = profile;
  for (Figure* f : {&cores.cores, &cores.cpu_update, &cores.host_stream}) f->value *= 2.0;
  cores.cpu_update_cores.value *= 2.0;
  consider("twice the cores", options, facts, cores, compute);
  std::vector<LayerSeconds> fast(compute.begin(), compute.end());
  for (LayerSeconds& s : fast) s = {s.forward / 2.0, s.backward / 2.0};
  consider("a device of twice the arithmetic", options, facts, profile, fast);
  std::stable_sort(list.begin(), list.end(),
                   [](const Upgrade& a, const Upgrade& b) { return a.step_seconds < b.step_seconds; });
  return list;
}

}  // namespace tandem
