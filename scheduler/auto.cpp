#include "scheduler/auto.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <random>
#include <set>
#include <utility>

#include "core/error.hpp"
#include "scheduler/lumps.hpp"

namespace tandem {
namespace {

// Simulated tasks that a search may spend, and what it may have spent before it changes single subgroups.
constexpr std::int64_t task_budget = 1'500'000;
constexpr std::int64_t task_budget_of_shares = 750'000;
// ... where there are many subgroups, on looking for a division, and at the end on what was the best for a while.
constexpr std::int64_t task_budget_of_many = 1'500'000;
constexpr std::int64_t task_budget_at_the_end = 150'000;
// ... and on comparing with fixed policies piece by piece: what is reached by hundreds of thousands of pieces alone.
constexpr std::int64_t task_budget_of_comparison = 8'000'000;
// Beyond this many subgroups, single ones do not matter.
constexpr std::size_t few_subgroups = 48;
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
  auto operator<=>(const Division&) const = default;
};
struct Trial {
  Division division;
  double seconds = 0.0;
};
/// What is closest to the plan.
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
/// What the search chooses: a path for each subgroup, and the threads of those on the CPU.
struct Setting {
  std::vector<UpdatePath> paths;
  int update_threads = 0;
  auto operator<=>(const Setting&) const = default;
};
/// Where a setting is changed from, piece by piece.
struct Start {
  Setting setting;
  double seconds = 0.0;
};

constexpr double unlimited = std::numeric_limits<double>::infinity();
// What takes up to so many times the best in lumps may be the best piece by piece: lumps were at most 4.1% off. Of what
// takes longer it is enough to know that it does.
constexpr double off_in_lumps = 1.12;
constexpr double worth_knowing = off_in_lumps * off_in_lumps;
// Where the best fixed policy takes longer by more than this, a search does not catch up: it was seen to gain a fifth.
constexpr double search_gains = 1.3;
constexpr double worthwhile = 1e-6;  // relative gain below which a change is noise
// A step that is longer than what the device computes by no more than this share of it is as good as any.
constexpr double as_good_as_any = 1e-3;
// One change in so many is of the CPU's threads.
constexpr std::size_t threads_once_in = 24;
constexpr std::array all_paths{UpdatePath::cpu, UpdatePath::streamed, UpdatePath::resident};

std::vector<UpdatePath> paths_of(const Plan& plan) {
  std::vector<UpdatePath> paths;
  for (const Subgroup& s : plan.subgroups) paths.push_back(s.path());
  return paths;
}
Setting setting_of(const Plan& plan) { return {paths_of(plan), plan.update_threads}; }

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

/// `device` keeps every layer there.
bool contradicts(const ParameterLayout& layout, const OffloadOptions& options) {
  return options.policy.kind == Policy::Kind::device && options.resident_layers >= 0 &&
         options.resident_layers < layout.layer_count();
}

/// A candidate and its plan. Until the search ends both stay where they are.
struct Fitting {
  Candidate* candidate = nullptr;
  const Plan* plan = nullptr;
  double seconds() const { return candidate->simulation.step_seconds; }
};
void sort_fastest_first(std::vector<Fitting>& fitting) {
  std::stable_sort(fitting.begin(), fitting.end(),
                   [](const Fitting& a, const Fitting& b) { return a.seconds() < b.seconds(); });
}

/// That a simulation which is to be exact takes: 0, each piece for itself, but where a step of a large model and many
/// micro-batches would be tens of millions of tasks.
std::int64_t lumps_at_most(const Plan& plan) {
  constexpr std::int64_t most_pieces = 1'000'000;
  constexpr int passes = 4;  // those that follow repeat them
  const Accumulation walked = in_lumps({plan.max_micro_batches, plan.micro_batches_at_once}, fewest_micro_batches);
  const std::int64_t micro_batches = std::min(walked.micro_batches, passes * walked.at_once);
  std::int64_t pieces = 0;
  for (const Subgroup& s : plan.subgroups) pieces += (s.count() + plan.piece_elements - 1) / plan.piece_elements;
  return pieces * micro_batches <= most_pieces ? 0 : most_pieces / micro_batches;
}

class Search {
 public:
  Search(const ParameterLayout& layout, const OffloadOptions& options, const PlanningFacts& facts,
         const MachineProfile& profile, std::span<const LayerSeconds> compute, const SearchSettings& settings)
      : layout_(layout), options_(options), facts_(facts), profile_(profile), compute_(compute), settings_(settings) {}

  Choice run();

 private:
  std::optional<Plan> plan(const OffloadOptions& options);
  Simulation simulated(const Plan& plan, std::int64_t lumps, double limit);
  Simulation exactly(const Plan& plan, double limit) { return simulated(plan, lumps_at_most(plan), limit); }
  Simulation quickly(const Plan& plan, double limit);
  void try_fixed();
  void consider(const Policy& policy, std::optional<Plan> made);
  void improve();
  double seconds_with(const Setting& setting, double limit);
  void try_shares();
  void try_threads();
  void wander_from_all();
  std::vector<Fitting> fitting();
  std::vector<Start> where_to_start();
  Start wander(Start start, double first_threshold, std::int64_t tasks);
  void finish();
  void measure_rates();
  void compare_fixed();
  void compare_passed();
  bool take_if_faster(const Plan& plan, const Simulation& simulation);
  void note(const Plan& plan, const Simulation& simulation);
  std::vector<UpdatePath> divided(const Division& division) const;
  double seconds_of(const Division& division, double limit);
  std::size_t most_residents(double streamed_share);
  std::vector<Fitting> fastest_policies(std::size_t most);
  void refine(Trial best);
  int threads_to_try() const;
  bool may_go_on() const { return choice_.simulated_tasks + planned_ < allowance_ && best_seconds_ > enough_; }

  const ParameterLayout& layout_;
  const OffloadOptions& options_;
  const PlanningFacts& facts_;
  const MachineProfile& profile_;
  std::span<const LayerSeconds> compute_;
  const SearchSettings& settings_;

  std::vector<Plan> fitting_;  ///< of `choice_.candidates` that fit, in their order
  Choice choice_;
  std::optional<Plan> best_;
  std::array<Start, 2> best_of_kind_;  ///< of what streams no state, and of what does
  std::vector<Plan> passed_;           ///< what was the best for a while, and no fixed policy
  double best_seconds_ = 0.0;          ///< as `quickly` has it
  double enough_ = 0.0;                ///< seconds that are not worth looking for less
  bool improved_ = false;
  std::int64_t planned_ = 0;    ///< subgroups, where there are many: to plan one costs what a task does
  std::int64_t allowance_ = 0;  ///< tasks simulated before what is searched at the moment must end
};

std::optional<Plan> Search::plan(const OffloadOptions& options) {
  if (best_ && best_->subgroups.size() > few_subgroups) planned_ += std::ssize(best_->subgroups);
  return find_plan(layout_, options, facts_);
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
  return simulated(plan, std::max(fewest_lumps, lumps), std::min(limit, search_gains * settings_.faster_than));
}

void Search::try_fixed() {
  std::vector<std::string> policies{options_.policy.text()};
  if (options_.policy.kind == Policy::Kind::automatic) policies = fixed_policies();
  // First, so that another takes its place only where it is faster.
  if (settings_.present != nullptr) consider(settings_.present->policy, *settings_.present);
  for (const std::string& text : policies) {
    OffloadOptions fixed = options_;
    fixed.policy = parse_policy(text);
    consider(fixed.policy, contradicts(layout_, fixed) ? std::nullopt : plan(fixed));
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
    note(*made, candidate.simulation);
    const double seconds = candidate.simulation.step_seconds;
    if (!best_ || seconds < best_seconds_) {
      best_ = *made;
      best_seconds_ = seconds;
    }
    fitting_.push_back(*std::move(made));
  }
  choice_.candidates.push_back(std::move(candidate));
}

/// In the order in which they were looked at.
std::vector<Fitting> Search::fitting() {
  std::vector<Fitting> fitting;
  for (Candidate& candidate : choice_.candidates) {
    if (candidate.fits) fitting.push_back({&candidate, &fitting_[fitting.size()]});
  }
  return fitting;
}

/// With divisions that differ.
std::vector<Fitting> Search::fastest_policies(std::size_t most) {
  std::vector<Fitting> fixed = fitting();
  sort_fastest_first(fixed);
  std::vector<Fitting> fastest;
  std::set<Setting> known;
  for (const Fitting& f : fixed) {
    if (fastest.size() == most) break;
    if (known.insert(setting_of(*f.plan)).second) fastest.push_back(f);
  }
  return fastest;
}

void Search::note(const Plan& plan, const Simulation& simulation) {
  Start& best = best_of_kind_[plan.shares().streamed > 0 ? 1 : 0];
  const bool better = best.setting.paths.empty() || simulation.step_seconds < best.seconds;
  if (!simulation.given_up && better) best = {setting_of(plan), simulation.step_seconds};
}

/// Infinite where it does not fit, and no less than `limit` where it is not. Keeps the plan where it is the best so
/// far.
double Search::seconds_with(const Setting& setting, double limit) {
  OffloadOptions options = options_;
  options.policy = parse_policy("static:0");  // paths stand in its place, and weights are as resident as fits
  options.paths = setting.paths;
  options.update_threads = setting.update_threads;
  std::optional<Plan> made = plan(options);
  if (!made) return std::numeric_limits<double>::infinity();
  made->policy = options_.policy;  // no fixed one
  const Simulation simulation = quickly(*made, std::max(limit, best_seconds_));
  note(*made, simulation);
  const double seconds = simulation.step_seconds;
  if (seconds < best_seconds_ * (1.0 - worthwhile)) {
    if (improved_) passed_.push_back(*std::move(best_));
    best_ = std::move(made);
    best_seconds_ = seconds;
    improved_ = true;
  }
  return seconds;
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

double Search::seconds_of(const Division& division, double limit) {
  return seconds_with({divided(division), best_->update_threads}, limit);
}

/// How many subgroups can stay on the device where of the others this share is streamed.
std::size_t Search::most_residents(double streamed_share) {
  std::size_t low = 0;
  std::size_t high = best_->subgroups.size();
  OffloadOptions options = options_;
  options.policy = parse_policy("static:0");
  while (low < high) {
    const std::size_t middle = (low + high + 1) / 2;
    options.paths = divided({middle, streamed_share, Residents::last});
    if (plan(options)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

/// What is not resident on the CPU, streamed, or divided by the closed form; beside each as many residents as fit, and
/// fewer, since what they leave may be worth more to weights. From the best of these and of the policies the search
/// goes on, several times: hills lie between.
void Search::try_shares() {
  constexpr std::size_t starts = 5;
  const MachineProfile profile = in_format(profile_, options_.state);
  const PathSetting setting{.weights_resident = best_->layers.back().resident,
                            .gradient_on_device = true,
                            .cpu_kernel_bytes = profile.cpu_update_bytes.value,
                            .state = options_.state};
  choice_.closed_form_cpu_share = best_cpu_share(profile, setting);
  std::vector<Trial> trials;
  std::set<Division> known;
  const auto attempt = [&](const Division& division) {
    if (may_go_on() && known.insert(division).second) {
      trials.push_back({division, seconds_of(division, worth_knowing * best_seconds_)});
    }
  };
  for (const Fitting& policy : fastest_policies(starts)) attempt(division_of(*policy.plan));
  for (const double streamed : {1.0 - choice_.closed_form_cpu_share, 0.0, 1.0}) {
    constexpr std::size_t steps = 8;
    const std::size_t most = most_residents(streamed);
    for (std::size_t fewer = 0; fewer <= steps; ++fewer) {
      attempt({most - most * fewer * fewer / (steps * steps), streamed, Residents::last});
    }
  }
  std::stable_sort(trials.begin(), trials.end(), [](const Trial& a, const Trial& b) { return a.seconds < b.seconds; });
  trials.resize(std::min(trials.size(), starts));
  for (const Trial& trial : trials) refine(trial);
}

/// Residents elsewhere, a step more or fewer of them, a step more or less streamed; and the steps halved where none
/// helps.
void Search::refine(Trial best) {
  constexpr double finest = 0.004;
  double share = 0.15;
  auto count = static_cast<std::int64_t>(std::max<std::size_t>(1, best_->subgroups.size() / 16));
  const auto improves = [&](const Division& next) {
    const double seconds = seconds_of(next, best.seconds);
    if (seconds >= best.seconds * (1.0 - worthwhile)) return false;
    best = {next, seconds};
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
        better |= improves({std::min(static_cast<std::size_t>(moved), best_->subgroups.size()),
                            std::clamp(best.division.streamed_share + streamed, 0.0, 1.0), best.division.where});
      }
    }
    if (better) continue;
    share /= 2.0;
    count = std::max<std::int64_t>(1, count / 2);
  }
}

/// That the CPU's update has; 0 where their number is the caller's, or where none is to spare.
int Search::threads_to_try() const {
  constexpr int enough = 4;
  const auto all = static_cast<int>(profile_.cpu_update_cores.value);
  return options_.update_threads > 0 || all < enough ? 0 : all;
}

/// Of the CPU's update, for the same division: where DRAM is full, what fewer leave of it goes to copies.
void Search::try_threads() {
  constexpr int parts = 8;
  const int all = threads_to_try();
  if (all == 0 || best_->shares().cpu == 0) return;
  Setting setting = setting_of(*best_);
  for (int part = parts - 1; part >= parts / 2 && may_go_on(); --part) {
    setting.update_threads = all * part / parts;
    seconds_with(setting, best_seconds_);
  }
}

/// Another division close by: two subgroups exchanged, since where memory is full none becomes resident unless another
/// leaves, or one or two another way; now and then another number of the CPU's `threads` (0: that stays).
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

/// From one good division to another many subgroups may have to change at once: what streams no state needs no buffers
/// for it, and each layer whose state stays takes the room of several whose weights do. So from the best of either kind
/// and from the best policies.
std::vector<Start> Search::where_to_start() {
  constexpr std::size_t policies = 4;
  std::vector<Start> starts;
  for (const Fitting& f : fastest_policies(policies)) starts.push_back({setting_of(*f.plan), f.seconds()});
  for (const Start& best : best_of_kind_) {
    if (!best.setting.paths.empty()) starts.push_back(best);
  }
  return starts;
}

/// Threshold accepting (Dueck and Scheuer, J. Comput. Phys. 90, 1990): goes on from what is slower by less than a
/// threshold that falls to nothing, so that it does not end on the first hill. A simulation may give up beyond it.
/// Returns the best that it came by.
Start Search::wander(Start start, double first_threshold, std::int64_t tasks) {
  constexpr std::size_t tries_of_each = 300;
  const std::size_t tries = tries_of_each * start.setting.paths.size();
  const std::int64_t begun = choice_.simulated_tasks;
  allowance_ = begun + tasks;
  std::mt19937_64 random;  // the same in every search
  const int threads = threads_to_try();
  Start current = start;
  std::set<Setting> seen{current.setting};
  for (std::size_t i = 0; i < tries && may_go_on(); ++i) {
    Setting next = current.setting;
    change(next, threads, random);
    if (!seen.insert(next).second) continue;
    const double spent = std::max(static_cast<double>(i) / static_cast<double>(tries),
                                  static_cast<double>(choice_.simulated_tasks - begun) / static_cast<double>(tasks));
    const double limit = current.seconds * (1.0 + first_threshold * (1.0 - spent) * (1.0 - spent));
    const double seconds = seconds_with(next, limit);
    if (seconds > limit) continue;
    current = {std::move(next), seconds};
    if (seconds < start.seconds) start = current;
  }
  return start;
}

void Search::improve() {
  if (options_.policy.kind != Policy::Kind::automatic || fitting_.empty()) return;
  const double least = seconds_of_step(compute_, options_.max_micro_batches) + profile_.step_overhead.value;
  enough_ = (1.0 + as_good_as_any) * least;
  const bool few = best_->subgroups.size() <= few_subgroups;
  allowance_ = few ? task_budget_of_shares : choice_.simulated_tasks + planned_ + task_budget_of_many;
  try_shares();
  try_threads();
  if (few) return wander_from_all();
  refine({division_of(*best_), best_seconds_});  // with their number
}

/// A little from each start, and on from where that led to the best.
void Search::wander_from_all() {
  constexpr double little = 0.002;
  constexpr double more = 0.006;
  std::vector<Start> starts = where_to_start();
  const auto left = [&] { return std::max<std::int64_t>(0, task_budget - choice_.simulated_tasks); };
  const std::int64_t tasks = left() / (2 * static_cast<std::int64_t>(starts.size()));
  for (Start& start : starts) start = wander(std::move(start), little, tasks);
  const auto best = std::min_element(starts.begin(), starts.end(),
                                     [](const Start& a, const Start& b) { return a.seconds < b.seconds; });
  wander(std::move(*best), more, left());
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
  choice_.simulation =
      simulate(layout_, *best_, profile_, compute_,
               {.micro_batches = options_.max_micro_batches, .measured_rates = true, .lumps = lumps_at_most(*best_)});
  choice_.simulation.step_seconds = seconds;
}

/// The closest first, until lumps are sure to have been slower, or too much has been spent.
void Search::compare_fixed() {
  std::vector<Fitting> compared = fitting();
  if (!settings_.never_slower_than_fixed) compared.resize(settings_.present != nullptr ? 1 : 0);
  sort_fastest_first(compared);
  const std::int64_t allowance = choice_.simulated_tasks + task_budget_of_comparison;
  for (const auto& [candidate, plan] : compared) {
    if (choice_.simulated_tasks > allowance) break;
    const bool many = plan->subgroups.size() > few_subgroups;
    if (many && candidate->simulation.step_seconds > off_in_lumps * choice_.simulation.step_seconds) break;
    if (!improved_ && plan->policy.text() == best_->policy.text()) {
      candidate->simulation = choice_.simulation;  // a comparison with itself would give up at its own time
      continue;
    }
    candidate->simulation = exactly(*plan, many ? choice_.simulation.step_seconds : unlimited);
    if (take_if_faster(*plan, candidate->simulation)) improved_ = false;
  }
}

/// The search may have followed what only lumps gain by.
void Search::compare_passed() {
  if (best_->subgroups.size() <= few_subgroups) return;
  const std::int64_t allowance = choice_.simulated_tasks + task_budget_at_the_end;
  for (; !passed_.empty() && choice_.simulated_tasks < allowance; passed_.pop_back()) {
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
  if (best_seconds_ <= search_gains * settings_.faster_than) improve();
  finish();
  return std::move(choice_);
}

}  // namespace

bool some_policy_fits(const ParameterLayout& layout, OffloadOptions options, const PlanningFacts& facts) {
  if (options.policy.kind != Policy::Kind::automatic) return find_plan(layout, options, facts).has_value();
  return std::ranges::any_of(fixed_policies(), [&](const std::string& policy) {
    options.policy = parse_policy(policy);
    return !contradicts(layout, options) && find_plan(layout, options, facts);
  });
}

Choice choose_plan(const ParameterLayout& layout, const OffloadOptions& options, const PlanningFacts& facts,
                   const MachineProfile& profile, std::span<const LayerSeconds> compute,
                   const SearchSettings& settings) {
  return Search(layout, options, facts, profile, compute, settings).run();
}

}  // namespace tandem
