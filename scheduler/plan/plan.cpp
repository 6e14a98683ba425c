#include "scheduler/plan/plan.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "core/base/direct_buffer.hpp"
#include "core/base/error.hpp"
#include "core/tensor/layout_quantum.hpp"
#include "scheduler/plan/divided_state.hpp"
#include "scheduler/plan/plan_builder.hpp"
#include "scheduler/plan/rank_slice.hpp"

namespace tandem {

std::string_view name_of(Tier tier) noexcept {
  switch (tier) {
    case Tier::device:
      return "device";
    case Tier::host:
      return "host";
    case Tier::file:
      return "file";
  }
  return "";
}
std::string_view name_of(Updater updater) noexcept { return updater == Updater::cpu ? "cpu" : "device"; }

std::string_view name_of(Speculate speculate) noexcept {
  switch (speculate) {
    case Speculate::off:
      return "off";
    case Speculate::automatic:
      return "auto";
    case Speculate::on:
      return "on";
  }
  return "";
}

std::string_view name_of(StateFormat format) noexcept {
  switch (format) {
    case StateFormat::fp32:
      return "fp32";
    case StateFormat::split:
      return "split";
    case StateFormat::bf16_moments:
      return "bf16-moments";
    case StateFormat::byte_moments:
      return "8bit-moments";
    case StateFormat::fp32_weights:
      return "fp32-weights";
    case StateFormat::lion:
      return "lion";
    case StateFormat::lion_fp32_weights:
      return "lion-fp32-weights";
  }
  return "";
}

std::size_t booked_state_bytes(std::int64_t elements, StateFormat format) noexcept {
  return align_up(master_bytes(format, elements)) + align_up(m_bytes(format, elements)) +
         align_up(v_bytes(format, elements));
}

std::size_t file_state_bytes(std::int64_t elements, StateFormat format) noexcept {
  return align_up(booked_state_bytes(elements, format), direct_block_bytes);
}

std::size_t Plan::file_bytes(const Subgroup& subgroup) const noexcept {
  const std::int64_t piece = piece_of(subgroup), whole = subgroup.count() / piece;
  const StateFormat format = format_of(subgroup);
  return static_cast<std::size_t>(whole) * file_state_bytes(piece, format) +
         file_state_bytes(subgroup.count() - whole * piece, format);
}

std::size_t Plan::file_bytes_of_step() const noexcept {
  std::size_t bytes = 0;
  for (const Subgroup& s : subgroups) bytes += s.tier == Tier::file ? file_bytes(s) : 0;
  return bytes;
}

Plan::Shares Plan::shares() const noexcept {
  Shares shares;
  for (const Subgroup& s : subgroups) {
    const UpdatePath path = s.path();
    (path == UpdatePath::cpu        ? shares.cpu
     : path == UpdatePath::streamed ? shares.streamed
                                    : shares.resident) += s.count();
  }
  return shares;
}

std::int64_t Plan::speculating_parameters() const noexcept {
  std::int64_t count = 0;
  for (const Subgroup& s : subgroups) count += s.speculates ? s.count() : 0;
  return count;
}

bool Plan::streams_weights() const noexcept {
  return std::any_of(layers.begin(), layers.end(), [](const LayerPlacement& l) { return !l.resident; });
}

bool Plan::sends_gradients() const noexcept {
  return std::any_of(subgroups.begin(), subgroups.end(), [](const Subgroup& s) { return !s.gradient_on_device; });
}

namespace {

// Bytes: what is said to fit is to fit in the next run too, where the program holds a little more or less.
constexpr std::size_t rerun_slack_bytes = std::size_t{4} << 20;

/// Bytes by which the plan and everything beside it passes the host memory, under options that hold the device's own
/// reserve.
std::size_t over_host_memory(const OffloadOptions& options, const PlanningFacts& facts, const Plan& plan) noexcept {
  return over_host_memory(options, facts, plan.memory.host_bytes() + options.reserved_host_memory,
                          plan.memory.device_bytes() + options.reserved_device_memory);
}

/// Bytes that the plan takes on the device, the driver's share included.
std::size_t device_bytes_of(const Plan& plan, const PlanningFacts& facts) noexcept {
  return plan.memory.device_bytes() + page_table_bytes(plan.memory.bytes_in(Place::pinned), facts, plan.rank);
}

/// Spends spare device memory where it saves most: first what lets copies overlap, then fetches of fewer bytes and
/// gradients that need not travel, then layers that need not be fetched. Never at the cost of host memory that there is
/// not.
Plan improve(const DividedState& divided, const PlanningFacts& facts, Knobs& knobs, Plan plan, std::size_t budget) {
  const OffloadOptions& options = divided.options();
  std::size_t over = over_host_memory(options, facts, plan);
  const auto attempt = [&](const Knobs& candidate) {
    Plan better = divided.plan(candidate);
    const std::size_t over_then = over_host_memory(options, facts, better);
    if (device_bytes_of(better, facts) > budget || over_then > over) return false;
    over = over_then;
    plan = std::move(better);
    knobs = candidate;
    return true;
  };
  // Whether it fits into what is free now, though a ceiling may insist on more.
  const auto fits_unforced = [&](const Knobs& candidate) {
    PlanningFacts free = facts;
    free.host_limit = 0;
    return over_host_memory(options, free, divided.plan(candidate)) == 0;
  };
  Knobs wish = knobs;
  wish.small_pieces = false;
  if (!attempt(wish)) wish = knobs;
  wish.gradient_buffers = 2;
  if (!attempt(wish)) wish = knobs;
  wish.send_sums = true;
  if (!attempt(wish)) wish = knobs;
  if (!options.prefetch_layers) {
    wish.prefetch = 2;
    if (!attempt(wish)) wish = knobs;
  }
  wish.codes = options.link_codes;
  if (wish.codes && (!fits_unforced(wish) || !attempt(wish))) wish = knobs;
  wish.keep_gradients = true;
  if (!attempt(wish)) wish = knobs;
  if (!options.resident_layers && options.policy.kind != Policy::Kind::device) {
    int low = knobs.resident_layers;  // fits
    int high = divided.layout().layer_count();
    // Without buffers for those that pass, all may take less than most of them.
    wish.resident_layers = high;
    if (attempt(wish)) low = high;
    while (low < high) {
      wish.resident_layers = (low + high + 1) / 2;
      if (attempt(wish)) {
        low = wish.resident_layers;
      } else {
        high = wish.resident_layers - 1;
      }
    }
    wish = knobs;
  }
  return plan;
}

/// The plan with memory for updates ahead of the norm, where that is left: of what is free now, though a ceiling may
/// insist on more.
Plan with_speculation(const DividedState& divided, PlanningFacts facts, Knobs& knobs, Plan plan, std::size_t budget) {
  if (plan.shares().cpu == 0) return plan;
  facts.host_limit = 0;
  Knobs wish = knobs;
  wish.speculates = true;
  Plan ahead = divided.plan(wish);
  if (device_bytes_of(ahead, facts) > budget || over_host_memory(divided.options(), facts, ahead) > 0) return plan;
  knobs = wish;
  return ahead;
}

/// The plan with as little of the state in a file as brings it under the host memory that there is, or all of it. Less
/// of the host is then pinned, and so the driver's share of the device is smaller.
Plan with_state_in_file(const DividedState& divided, const PlanningFacts& facts, Knobs knobs, Plan plan) {
  const OffloadOptions& options = divided.options();
  const auto moved = [&] {
    std::size_t bytes = 0;
    for (const Subgroup& s : plan.subgroups) {
      if (s.tier == Tier::file) bytes += booked_state_bytes(s.count(), plan.format_of(s));
    }
    return bytes;
  };
  while (const std::size_t over = over_host_memory(options, facts, plan)) {
    const std::size_t before = moved();
    knobs.file_bytes = before + part_of_rank(over, options.rank);
    plan = divided.plan(knobs);
    if (moved() == before) break;  // there is no more
  }
  return plan;
}

std::size_t ceiling_of(const OffloadOptions& options, const PlanningFacts& facts) {
  const std::size_t most = facts.device_capacity + facts.device_reserved;
  return std::min(options.device_memory.value_or(most), most);
}

std::string megabytes_flag(std::size_t bytes) {
  constexpr std::size_t mib = std::size_t{1} << 20;
  return fmt::format("{}MiB", (bytes + mib - 1) / mib);
}

OffloadOptions with_policy(OffloadOptions options, const Policy& policy) {
  options.policy = policy;
  return options;
}

/// "try A, or B" of flags that each fit.
std::string advice_of(const std::vector<std::string>& flags) {
  if (flags.empty()) return "use a smaller model, or fewer and shorter sequences at a time";
  return fmt::format("try {}", fmt::join(flags, ", or "));
}

/// The ceiling of host memory that would do, as a flag; empty where none would. `host` and `device`: what a run takes.
std::string ceiling_that_fits(OffloadOptions options, const PlanningFacts& facts, std::size_t host,
                              std::size_t device) {
  const auto over = [&](std::optional<std::size_t> ceiling) {
    options.host_memory = ceiling;
    return over_host_memory(options, facts, host, device);
  };
  const std::size_t needed = facts.device_is_host && over(std::nullopt) > 0 ? host + device : host;
  const std::size_t ceiling = of_all_ranks(needed + rerun_slack_bytes, options.rank);
  return over(ceiling) > 0 ? std::string{} : fmt::format("--host-memory {}", megabytes_flag(ceiling));
}

/// Notes the memory beside the plan's own, so that its table names every byte under the ceilings. `options` hold the
/// device's own reserve.
void note_reserves(Plan& plan, const OffloadOptions& options, const PlanningFacts& facts) {
  plan.reserved_device_memory = options.reserved_device_memory - facts.device_reserved;
  plan.device_reserved = facts.device_reserved;
  plan.page_tables = page_table_bytes(plan.memory.bytes_in(Place::pinned), facts, options.rank);
  plan.reserved_host_memory = options.reserved_host_memory;
}

[[noreturn]] void refuse_device(const ParameterLayout& layout, const OffloadOptions& options,
                                const PlanningFacts& facts, Plan smallest, std::size_t ceiling) {
  const auto device_bytes = [&](const Plan& plan) {
    return device_bytes_of(plan, facts) + options.reserved_device_memory;
  };
  std::vector<std::string> fitting;
  // More of the device is of no use where host memory is too small, too: then a ceiling of that has to be raised
  // beside it, as far as there is memory.
  const auto add = [&](const Plan& plan, std::string flags, std::string_view remark) {
    if (over_host_memory(options, facts, plan) > 0) {
      const std::size_t host = plan.memory.host_bytes() + options.reserved_host_memory;
      const std::string more = ceiling_that_fits(options, facts, host, device_bytes(plan));
      if (more.empty()) return;
      flags += " " + more;
    }
    fitting.push_back(fmt::format("{}{}", flags, remark));
  };
  const std::size_t need = device_bytes(smallest);
  add(smallest, fmt::format("--device-memory {}", megabytes_flag(need)), "");
  OffloadOptions frugal = with_policy(options, Policy::host());
  frugal.resident_layers = 0;
  frugal.prefetch_layers = 1;
  const Plan little = DividedState(layout, frugal).smallest();
  const std::size_t least = device_bytes(little);
  const bool under = least <= ceiling;
  const bool trains = layout.state_elements() > 0;  // else no policy divides anything
  if (least < need && (under || megabytes_flag(least) != megabytes_flag(need))) {
    std::string flags =
        trains ? "--policy host --resident-layers 0 --prefetch-layers 1" : "--resident-layers 0 --prefetch-layers 1";
    if (!under) flags += fmt::format(" --device-memory {}", megabytes_flag(least));
    add(little, std::move(flags), under ? fmt::format(" (needs {})", format_bytes(least)) : std::string());
  }
  note_reserves(smallest, options, facts);
  throw PlanError(
      "the plan does not fit on the device",
      fmt::format("{} needs at least {}, the ceiling is {}", trains ? "policy " + smallest.policy.text() : "it",
                  format_bytes(need), format_bytes(ceiling)),
      advice_of(fitting), smallest.table(), std::make_shared<const MemoryPlan>(smallest.needs()));
}

/// The plan of a policy other than `auto`.
Plan plan_fixed(const DividedState& divided, const PlanningFacts& facts, std::size_t ceiling) {
  const ParameterLayout& layout = divided.layout();
  const OffloadOptions& options = divided.options();
  Knobs knobs = smallest_knobs(layout, options);
  Plan plan = divided.plan(knobs);
  const std::size_t budget = ceiling > options.reserved_device_memory ? ceiling - options.reserved_device_memory : 0;
  if (device_bytes_of(plan, facts) > budget) refuse_device(layout, options, facts, plan, ceiling);
  plan = improve(divided, facts, knobs, std::move(plan), budget);
  if (options.speculate == Speculate::automatic) {
    plan = with_speculation(divided, facts, knobs, std::move(plan), budget);
  }
  if (options.state_folder) plan = with_state_in_file(divided, facts, knobs, std::move(plan));
  plan.device_memory = ceiling;
  return plan;
}

/// The least that a plan of a policy other than `auto` takes on the device, with the caller's share.
std::size_t smallest_bytes(const DividedState& divided, const PlanningFacts& facts) {
  return device_bytes_of(divided.smallest(), facts) + divided.options().reserved_device_memory;
}

/// Plan of policy auto: as much of the state on the device as fits; the plan that is least over host memory where that
/// is too small for any.
Plan plan_automatic(const ParameterLayout& layout, const OffloadOptions& options, const PlanningFacts& facts,
                    std::size_t ceiling) {
  std::vector<Policy> candidates{Policy::device()};
  for (int tenths = 1; tenths < 10; ++tenths) candidates.push_back(Policy::static_share(tenths / 10.0));
  candidates.push_back(Policy::host());
  std::optional<Plan> least;
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const OffloadOptions fixed = with_policy(options, candidates[i]);
    if (i == 0 && keeps_fewer_layers(layout, options)) continue;
    const DividedState divided(layout, fixed);
    // The last is refused in words, where nothing before it fits on the device either.
    if ((i + 1 < candidates.size() || least) && smallest_bytes(divided, facts) > ceiling) continue;
    Plan plan = plan_fixed(divided, facts, ceiling);
    plan.chosen_by_auto = true;
    const std::size_t over = over_host_memory(options, facts, plan);
    if (over == 0) return plan;
    if (!least || over < over_host_memory(options, facts, *least)) least = std::move(plan);
  }
  if (!least) throw MisuseError("no policy is left to try");
  return *std::move(least);
}

std::size_t over_file_room(const PlanningFacts& facts, const Plan& plan) noexcept {
  if (facts.file_room == 0) return 0;
  const std::size_t bytes = of_all_ranks(plan.file_bytes_of_step(), plan.rank);
  return bytes > facts.file_room ? bytes - facts.file_room : 0;
}

OffloadOptions with_reserve(OffloadOptions options, const PlanningFacts& facts) {
  options.reserved_device_memory += facts.device_reserved;
  return options;
}

/// Fits on the device, and may yet be more than host memory has room for. Of options with the device's own reserve.
Plan plan_of_device(const ParameterLayout& layout, const OffloadOptions& options, const PlanningFacts& facts,
                    std::size_t ceiling) {
  Plan plan = options.policy.kind == Policy::Kind::automatic ? plan_automatic(layout, options, facts, ceiling)
                                                             : plan_fixed({layout, options}, facts, ceiling);
  plan.storage_hash = layout.storage_hash();  // here, as many plans are built before one is taken
  note_reserves(plan, options, facts);
  return plan;
}

/// plan_of_device() where the plan fits in host memory, too; none otherwise.
std::optional<Plan> plan_that_fits(const ParameterLayout& layout, const OffloadOptions& options,
                                   const PlanningFacts& facts, std::size_t ceiling) {
  try {
    Plan plan = plan_of_device(layout, options, facts, ceiling);
    if (over_host_memory(options, facts, plan) == 0 && over_file_room(facts, plan) == 0) return plan;
  } catch (const PlanError&) {  // the device is too small
  }
  return std::nullopt;
}

/// Flags that make it fit in host memory without asking for more of it; empty where none of those known here do.
std::string flags_that_fit(const ParameterLayout& layout, const OffloadOptions& options, const PlanningFacts& facts,
                           std::size_t ceiling) {
  const auto fits = [&](const OffloadOptions& other) {
    return plan_that_fits(layout, other, facts, ceiling).has_value();
  };
  if (options.paths) return {};  // they stand in place of any policy
  OffloadOptions other = options;
  std::vector<StateFormat> formats{options.state};
  if (optimizer_of(options.state) == Optimizer::adamw) {  // another optimizer is no smaller format
    formats.insert(formats.end(), {StateFormat::split, StateFormat::bf16_moments, StateFormat::byte_moments});
  }
  for (const StateFormat state : formats) {
    const std::string flag = state == options.state ? "" : fmt::format("--state {}", name_of(state));
    other.state = state;
    other.policy = options.policy;
    if (!flag.empty() && fits(other)) return flag;
    if (options.policy.kind == Policy::Kind::automatic || options.resident_layers) continue;
    other.policy = Policy::automatic();
    if (fits(other)) return flag + (flag.empty() ? "" : " ") + "--policy auto";
  }
  return {};
}

/// A file for what is too much, as a flag; empty where one would not do.
std::string file_that_fits(const ParameterLayout& layout, OffloadOptions options, const PlanningFacts& facts,
                           std::size_t ceiling) {
  if (options.state_folder) return {};
  options.state_folder = "DIR";
  const std::optional<Plan> plan = plan_that_fits(layout, options, facts, ceiling);
  if (!plan) return {};
  return fmt::format("--state-dir DIR on a fast disk, for {} of the state",
                     format_bytes(of_all_ranks(plan->file_bytes_of_step(), options.rank)));
}

[[noreturn]] void refuse_host(const ParameterLayout& layout, const OffloadOptions& options, const PlanningFacts& facts,
                              const Plan& plan, std::size_t ceiling) {
  const std::size_t host_each = plan.memory.host_bytes() + options.reserved_host_memory;
  const std::size_t device_each = plan.memory.device_bytes() + options.reserved_device_memory;
  const std::size_t host = of_all_ranks(host_each, options.rank), device = of_all_ranks(device_each, options.rank);
  std::string why;
  if (options.host_memory && host > *options.host_memory) {
    why = fmt::format("it needs {}, the ceiling is {}", format_bytes(host), format_bytes(*options.host_memory));
  } else if (facts.device_is_host) {
    why = fmt::format("it needs {}, {} of it as the device's memory, {} is available", format_bytes(host + device),
                      format_bytes(device), format_bytes(host_room(options, facts)));
  } else {
    why = fmt::format("it needs {}, {} is available", format_bytes(host), format_bytes(host_room(options, facts)));
  }
  if (options.rank.count > 1) why += fmt::format(", for all {} devices; the table is of one", options.rank.count);
  std::vector<std::string> fitting{flags_that_fit(layout, options, facts, ceiling),
                                   ceiling_that_fits(options, facts, host_each, device_each),
                                   file_that_fits(layout, options, facts, ceiling)};
  std::erase(fitting, "");
  throw PlanError("the plan does not fit in host memory", why, advice_of(fitting), plan.table(),
                  std::make_shared<const MemoryPlan>(plan.needs()));
}

[[noreturn]] void refuse_file(const ParameterLayout& layout, const OffloadOptions& options, const PlanningFacts& facts,
                              const Plan& plan, std::size_t ceiling) {
  std::vector<std::string> fitting{flags_that_fit(layout, options, facts, ceiling)};
  if (fitting.front().empty()) fitting = {"a --state-dir with more room", "more host memory"};
  throw PlanError(
      fmt::format("the optimizer state does not fit in {}", options.state_folder->string()),
      fmt::format("{} of it have no room in memory, {} are free there",
                  format_bytes(of_all_ranks(plan.file_bytes_of_step(), options.rank)), format_bytes(facts.file_room)),
      advice_of(fitting), plan.table(), std::make_shared<const MemoryPlan>(plan.needs()));
}

}  // namespace

bool keeps_fewer_layers(const ParameterLayout& layout, const OffloadOptions& options) noexcept {
  return options.resident_layers && *options.resident_layers < layout.layer_count();
}

void check_adamw(const AdamW& adamw) {
  const auto is_decay = [](double beta) { return beta >= 0.0 && beta < 1.0; };
  const auto is_finite = [](double value) { return std::isfinite(static_cast<float>(value)) && value >= 0.0; };
  const bool divides = static_cast<float>(adamw.eps) > 0.0F;  // without eps, 0 / 0 where there was no gradient yet
  if (is_decay(adamw.beta1) && is_decay(adamw.beta2) && is_finite(adamw.eps) && divides &&
      is_finite(adamw.weight_decay))
    return;
  throw UsageError(fmt::format("AdamW with betas {} and {}, eps {}, weight decay {}", adamw.beta1, adamw.beta2,
                               adamw.eps, adamw.weight_decay),
                   "betas are at least 0 and below 1, eps is above 0 and weight decay at least 0, both finite in fp32");
}

void check_options(const ParameterLayout& layout, const OffloadOptions& options) {
  if (layout.layer_count() == 0) throw MisuseError("the layout has no layers");
  options.policy.check();
  check_adamw(options.adamw);
  if (options.rank.count < 1 || options.rank.index < 0 || options.rank.index >= options.rank.count) {
    throw UsageError(fmt::format("rank {} of {}", options.rank.index, options.rank.count),
                     "ranks count from 0 to one less than there are");
  }
  if (options.device_memory == 0 || options.host_memory == 0) {
    throw UsageError("a memory ceiling of 0 bytes", "nothing fits under it", "leave it out for all that there is");
  }
  if (options.subgroup_size.value_or(1) < 1) throw UsageError("subgroup size must be at least 1");
  if (options.prefetch_layers.value_or(1) < 1) throw UsageError("prefetch layers must be at least 1");
  if (options.resident_layers.value_or(0) < 0) throw UsageError("resident layers are negative");
  if (options.state_folder && options.state_folder->empty()) throw UsageError("the folder for state has no name");
  if (options.max_micro_batches < 1) throw UsageError("micro-batches per step must be at least 1");
  if (options.micro_batches_at_once < 1) throw UsageError("micro-batches at once must be at least 1");
  if (std::min(options.micro_batches_at_once, options.max_micro_batches) > 1) {
    for (const Layer& layer : layout.layers()) {
      if (layer.uses == 1) continue;
      throw UsageError(fmt::format("layer {} is used {} times in backward", layer.name, layer.uses),
                       "its gradient is held meanwhile, of one micro-batch", "let one micro-batch pass at a time");
    }
  }
  if (options.update_threads.value_or(1) < 1) throw UsageError("update threads must be at least 1");
  if (!(options.watchdog_seconds > 0.0)) throw UsageError("the watchdog's time must be positive");
  if (options.resident_layers.value_or(0) > layout.layer_count()) {
    throw UsageError(fmt::format("{} resident layers", *options.resident_layers),
                     fmt::format("the model has {}", layout.layer_count()));
  }
  if (options.policy.kind == Policy::Kind::device && keeps_fewer_layers(layout, options)) {
    throw UsageError("policy 'device' keeps every layer on the device",
                     fmt::format("but {} resident layers were asked for", *options.resident_layers),
                     "leave out one of them");
  }
}

std::size_t page_table_bytes(std::size_t pinned, const PlanningFacts& facts, Rank rank) noexcept {
  constexpr std::size_t granule = std::size_t{2} << 20;  // by which a driver takes memory
  if (facts.pinned_per_page_table == 0) return 0;
  const std::size_t bytes =
      (of_all_ranks(pinned, rank) + facts.pinned_per_page_table - 1) / facts.pinned_per_page_table;
  return (bytes + granule - 1) / granule * granule;
}

std::size_t host_room(const OffloadOptions& options, const PlanningFacts& facts) noexcept {
  if (facts.host_available == 0) return 0;
  return std::max(facts.host_available, std::min(options.host_memory.value_or(0), facts.host_limit));
}

std::size_t over_host_memory(const OffloadOptions& options, const PlanningFacts& facts, std::size_t host,
                             std::size_t device) noexcept {
  const auto over = [&](std::size_t each, std::size_t limit) {
    const std::size_t bytes = of_all_ranks(each, options.rank);
    return limit > 0 && bytes > limit ? bytes - limit : std::size_t{0};
  };
  return std::max(over(host, options.host_memory.value_or(0)),
                  over(facts.device_is_host ? host + device : host, host_room(options, facts)));
}

Plan make_plan(const ParameterLayout& layout, const OffloadOptions& given, const PlanningFacts& facts) {
  check_options(layout, given);
  const OffloadOptions options = with_reserve(given, facts);
  const std::size_t ceiling = ceiling_of(given, facts);
  Plan plan = plan_of_device(layout, options, facts, ceiling);
  if (over_host_memory(options, facts, plan) > 0) refuse_host(layout, options, facts, plan, ceiling);
  if (over_file_room(facts, plan) > 0) refuse_file(layout, options, facts, plan, ceiling);
  return plan_of_rank(layout, options, std::move(plan));
}

std::optional<Plan> find_plan(const ParameterLayout& layout, const OffloadOptions& given, const PlanningFacts& facts) {
  check_options(layout, given);
  const OffloadOptions options = with_reserve(given, facts);
  std::optional<Plan> plan = plan_that_fits(layout, options, facts, ceiling_of(given, facts));
  return plan ? plan_of_rank(layout, options, *std::move(plan)) : plan;
}

Plan plan_of_rank(const ParameterLayout& layout, const OffloadOptions& options, Plan first) {
  if (options.rank.index == 0) return first;
  return PlanBuilder::for_rank(layout, options, std::move(first));
}

std::size_t smallest_device_memory(const ParameterLayout& layout, const OffloadOptions& options) {
  check_options(layout, options);
  const OffloadOptions fixed =
      options.policy.kind == Policy::Kind::automatic ? with_policy(options, Policy::host()) : options;
  return smallest_bytes({layout, fixed}, {});
}

}  // namespace tandem
