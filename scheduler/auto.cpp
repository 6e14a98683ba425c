#include "scheduler/auto.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <future>
#include <limits>
#include <optional>

#include "core/error.hpp"

namespace tandem {
namespace {

// Simulated tasks that a search may spend.
constexpr std::int64_t task_budget = 1'500'000;
// ... where there are many subgroups, on looking for a division, and at the end on what was the best for a while.
constexpr std::int64_t task_budget_of_many = 400'000;
constexpr std::int64_t task_budget_at_the_end = 150'000;
// Beyond this many subgroups, single ones do not matter.
constexpr std::size_t few_subgroups = 48;
constexpr std::size_t pairs_up_to = 8;
constexpr std::size_t climbs = 4;
// Pieces that a step simulates one by one; where it has more, so many lumps: their number is what a simulation costs,
// their size hardly matters.
constexpr std::int64_t few_pieces = 2000;
constexpr std::int64_t lumps_of_many = 300;
constexpr std::int64_t fewest_lumps = 120;
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
constexpr double unlimited = std::numeric_limits<double>::infinity();
// What takes up to so many times the best in lumps may be the best piece by piece: lumps were at most 4.1% off. Of what
// takes longer it is enough to know that it does.
constexpr double off_in_lumps = 1.12;
constexpr double worth_knowing = off_in_lumps * off_in_lumps;
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
         const MachineProfile& profile, std::span<const LayerSeconds> compute, const SearchSettings& settings)
      : layout_(layout), options_(options), facts_(facts), profile_(profile), compute_(compute), settings_(settings) {}

  Choice run();

 private:
  std::optional<Plan> plan(const OffloadOptions& options) const;
  Simulation simulated(const Plan& plan, std::int64_t lumps, double limit);
  Simulation exactly(const Plan& plan, double limit) { return simulated(plan, 0, limit); }
  Simulation quickly(const Plan& plan, double limit);
  void try_fixed();
  void consider(const Policy& policy, std::optional<Plan> made);
  void improve();
  double seconds_with(const std::vector<UpdatePath>& paths, double limit);
  bool attempt(const std::vector<UpdatePath>& paths);
  void try_shares();
  bool try_swaps();
  void try_changes();
  void finish();
  void measure_rates();
  void compare_fixed();
  void compare_passed();
  bool take_if_faster(const Plan& plan, const Simulation& simulation);
  std::vector<UpdatePath> divided(const Division& division) const;
  void refine(Division division, double least);
  bool may_spend() const { return choice_.simulated_tasks < allowance_; }

  const ParameterLayout& layout_;
  const OffloadOptions& options_;
  const PlanningFacts& facts_;
  const MachineProfile& profile_;
  std::span<const LayerSeconds> compute_;
  const SearchSettings& settings_;

  std::vector<Plan> fitting_;  ///< of `choice_.candidates` that fit, in their order
  Choice choice_;
  std::optional<Plan> best_;
  std::vector<Plan> passed_;   ///< what was the best for a while, and no fixed policy
  double best_seconds_ = 0.0;  ///< as `quickly` has it
  bool improved_ = false;
  std::int64_t allowance_ = 0;  ///< tasks simulated before what is searched at the moment must end
};

std::optional<Plan> Search::plan(const OffloadOptions& options) const {
  try {
    return make_plan(layout_, options, facts_);
  } catch (const PlanError&) {
    return std::nullopt;
  }
}

/// Gives up beyond `limit` seconds, where what is returned lies beyond it too.
Simulation Search::simulated(const Plan& plan, std::int64_t lumps, double limit) {
  const Simulation s = simulate(layout_, plan, profile_, compute_,
                                {.micro_batches = options_.max_micro_batches, .lumps = lumps, .give_up_after = limit});
  ++choice_.simulations;
  choice_.simulated_tasks += s.tasks;
  return s;
}

Simulation Search::quickly(const Plan& plan, double limit) {
  const std::int64_t pieces = layout_.state_elements() / plan.piece_elements * plan.max_micro_batches;
  if (pieces <= few_pieces) return exactly(plan, limit);
  // Passes of several micro-batches are longer, and a lump is a smaller part of one.
  const bool passes = plan.micro_batches_at_once < plan.max_micro_batches;
  const std::int64_t lumps = passes ? lumps_of_many / plan.micro_batches_at_once : lumps_of_many;
  return simulated(plan, std::max(fewest_lumps, lumps), std::min(limit, off_in_lumps * settings_.faster_than));
}

void Search::try_fixed() {
  std::vector<std::string> policies{options_.policy.text()};
  if (options_.policy.kind == Policy::Kind::automatic) policies = fixed_policies();
  // First, so that another takes its place only where it is faster.
  if (settings_.present != nullptr) consider(settings_.present->policy, *settings_.present);
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
    const bool many = made->subgroups.size() > few_subgroups;
    candidate.simulation = quickly(*made, many && best_ ? worth_knowing * best_seconds_ : unlimited);
    const double seconds = candidate.simulation.step_seconds;
    if (!best_ || seconds < best_seconds_) {
      best_ = *made;
      best_seconds_ = seconds;
    }
    fitting_.push_back(*std::move(made));
  }
  choice_.candidates.push_back(std::move(candidate));
}

/// Infinite where it does not fit, and no less than `limit` where it is not. Keeps the plan where it is the best so
/// far.
double Search::seconds_with(const std::vector<UpdatePath>& paths, double limit) {
  OffloadOptions options = options_;
  options.policy = best_->policy;
  options.paths = paths;
  // `device` means every layer resident: with state elsewhere it is another policy.
  if (options.policy.kind == Policy::Kind::device) options.policy = parse_policy("static:0");
  std::optional<Plan> made = plan(options);
  if (!made) return std::numeric_limits<double>::infinity();
  const double seconds = quickly(*made, std::max(limit, best_seconds_)).step_seconds;
  if (seconds < best_seconds_ * (1.0 - worthwhile)) {
    if (improved_) passed_.push_back(*std::move(best_));
    best_ = std::move(made);
    best_seconds_ = seconds;
    improved_ = true;
  }
  return seconds;
}

/// Whether it is better than the best so far.
bool Search::attempt(const std::vector<UpdatePath>& paths) {
  const double before = best_seconds_;
  seconds_with(paths, before);
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
      const double seconds = may_spend() ? seconds_with(divided(division), least) : least;
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
        const double seconds = seconds_with(divided(next), least);
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
  const bool few = best_->subgroups.size() <= few_subgroups;
  const std::int64_t budget = few ? task_budget : choice_.simulated_tasks + task_budget_of_many;
  const auto left = [&] { return std::max<std::int64_t>(0, budget - choice_.simulated_tasks); };
  allowance_ = choice_.simulated_tasks + (few ? left() / 2 : left());
  try_shares();
  std::vector<std::vector<UpdatePath>> climbed;
  const auto share_of_the_rest = [&] {
    return choice_.simulated_tasks + left() / static_cast<std::int64_t>(climbs + 1 - climbed.size());
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

/// Simulates the best piece by piece, and whatever lumps may have made slower than it.
void Search::finish() {
  choice_.simulation = exactly(*best_, settings_.faster_than);
  if (!choice_.simulation.given_up) {
    compare_fixed();
    compare_passed();
    if (best_->micro_batches_at_once > 1) measure_rates();
  }
  choice_.plan = *best_;
  choice_.plan.chosen_by_auto = options_.policy.kind == Policy::Kind::automatic;
  if (improved_) {
    choice_.candidates.push_back(
        {best_->policy, true, true, best_->shares(), best_->memory.device_bytes(), choice_.simulation});
  }
  std::stable_sort(choice_.candidates.begin(), choice_.candidates.end(), [](const Candidate& a, const Candidate& b) {
    if (a.fits != b.fits) return a.fits;
    return a.simulation.step_seconds < b.simulation.step_seconds;
  });
}

/// The step is the same up to rounding, and stays what it was compared by.
void Search::measure_rates() {
  const double seconds = choice_.simulation.step_seconds;
  choice_.simulation = simulate(layout_, *best_, profile_, compute_,
                                {.micro_batches = options_.max_micro_batches, .measured_rates = true});
  choice_.simulation.step_seconds = seconds;
}

/// The closest first, until lumps are sure to have been slower.
void Search::compare_fixed() {
  std::vector<std::pair<Candidate*, const Plan*>> fitting;
  for (Candidate& candidate : choice_.candidates) {
    if (candidate.fits) fitting.emplace_back(&candidate, &fitting_[fitting.size()]);
  }
  if (!settings_.never_slower_than_fixed) fitting.resize(settings_.present != nullptr ? 1 : 0);
  const auto seconds = [](const auto& of) { return of.first->simulation.step_seconds; };
  std::stable_sort(fitting.begin(), fitting.end(),
                   [&](const auto& a, const auto& b) { return seconds(a) < seconds(b); });
  for (const auto& [candidate, plan] : fitting) {
    const bool many = plan->subgroups.size() > few_subgroups;
    if (many && candidate->simulation.step_seconds > off_in_lumps * choice_.simulation.step_seconds) break;
    candidate->simulation = exactly(*plan, many ? choice_.simulation.step_seconds : unlimited);
    if (take_if_faster(*plan, candidate->simulation)) improved_ = false;
  }
}

/// The search may have followed what only lumps gain by.
void Search::compare_passed() {
  if (best_->subgroups.size() <= few_subgroups) return;
  allowance_ = choice_.simulated_tasks + task_budget_at_the_end;
  for (; !passed_.empty() && may_spend(); passed_.pop_back()) {
    const Simulation exact = exactly(passed_.back(), choice_.simulation.step_seconds);
    if (take_if_faster(passed_.back(), exact)) improved_ = true;
  }
}

bool Search::take_if_faster(const Plan& plan, const Simulation& simulation) {
  if (simulation.given_up || simulation.step_seconds >= choice_.simulation.step_seconds) return false;
  choice_.simulation = simulation;
  best_ = plan;
  return true;
}

Choice Search::run() {
  try_fixed();
  // The refusal of make_plan names what would fit.
  if (!best_) best_ = make_plan(layout_, options_, facts_);
  if (best_seconds_ == 0.0) best_seconds_ = quickly(*best_, unlimited).step_seconds;
  // The search gains less than lumps may be off.
  if (best_seconds_ <= off_in_lumps * settings_.faster_than) improve();
  finish();
  return std::move(choice_);
}

}  // namespace

Choice choose_plan(const ParameterLayout& layout, const OffloadOptions& options, const PlanningFacts& facts,
                   const MachineProfile& profile, std::span<const LayerSeconds> compute,
                   const SearchSettings& settings) {
  return Search(layout, options, facts, profile, compute, settings).run();
}

std::vector<Upgrade> upgrades(const ParameterLayout& layout, const OffloadOptions& options, const PlanningFacts& facts,
                              const MachineProfile& profile, std::span<const LayerSeconds> compute,
                              const Plan& chosen) {
  struct Wider {
    std::string what;
    OffloadOptions options;
    PlanningFacts facts;
    MachineProfile profile;
    std::vector<LayerSeconds> compute;
  };
  const std::vector<LayerSeconds> as_it_is(compute.begin(), compute.end());
  std::vector<Wider> machines;
  OffloadOptions roomy = options;
  PlanningFacts room = facts;
  // The caller's own share stays as it is: what is doubled is the whole card.
  roomy.device_memory *= 2;
  room.device_capacity *= 2;
  machines.push_back({"twice the device memory", roomy, room, profile, as_it_is});
  MachineProfile wide = profile;
  for (Figure* f : {&wide.to_device, &wide.to_host, &wide.both_ways}) f->value *= 2.0;
  machines.push_back({"a link of twice the rate", options, facts, wide, as_it_is});
  MachineProfile channels = profile;
  channels.dram.value *= 2.0;
  // The CPU update runs at DRAM's rate where that bounds it: more channels let it rise as far as its cores allow.
  machines.push_back({"twice the DRAM bandwidth", options, facts, channels, as_it_is});
  MachineProfile cores = profile;
  for (Figure* f : {&cores.cores, &cores.cpu_update, &cores.host_stream}) f->value *= 2.0;
  cores.cpu_update_cores.value *= 2.0;
  machines.push_back({"twice the cores", options, facts, cores, as_it_is});
  std::vector<LayerSeconds> fast = as_it_is;
  for (LayerSeconds& s : fast) s = {s.forward / 2.0, s.backward / 2.0};
  machines.push_back({"a device of twice the arithmetic", options, facts, profile, fast});
  const auto seconds_on = [&](const Wider& m) {
    const SearchSettings settings{.present = &chosen, .never_slower_than_fixed = false};
    return choose_plan(layout, m.options, m.facts, m.profile, m.compute, settings).simulation.step_seconds;
  };
  // Searches know nothing of each other.
  std::vector<std::future<double>> seconds;
  for (const Wider& m : machines) seconds.push_back(std::async(std::launch::async, seconds_on, std::cref(m)));
  std::vector<Upgrade> list;
  for (std::size_t i = 0; i < machines.size(); ++i) list.push_back({machines[i].what, seconds[i].get()});
  std::stable_sort(list.begin(), list.end(),
                   [](const Upgrade& a, const Upgrade& b) { return a.step_seconds < b.step_seconds; });
  return list;
}

}  // namespace tandem
