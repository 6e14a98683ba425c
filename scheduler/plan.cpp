#include "scheduler/plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "core/error.hpp"
#include "core/update_kernels.hpp"
#include "scheduler/plan_builder.hpp"

namespace tandem {

std::string_view name_of(Tier tier) noexcept { return tier == Tier::device ? "device" : "host"; }
std::string_view name_of(Updater updater) noexcept { return updater == Updater::cpu ? "cpu" : "device"; }

std::string_view name_of(StateFormat format) noexcept {
  switch (format) {
    case StateFormat::fp32:
      return "fp32";
    case StateFormat::split:
      return "split";
    case StateFormat::bf16_moments:
      return "bf16-moments";
  }
  return "";
}

std::size_t booked_state_bytes(std::int64_t elements, StateFormat format) noexcept {
  const auto n = static_cast<std::size_t>(elements);
  return align_up(n * master_bytes(format)) + 2 * align_up(n * moment_bytes(format));
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

bool Plan::streams_weights() const noexcept {
  return std::any_of(layers.begin(), layers.end(), [](const LayerPlacement& l) { return !l.resident; });
}

bool Plan::sends_gradients() const noexcept {
  return std::any_of(subgroups.begin(), subgroups.end(), [](const Subgroup& s) { return !s.gradient_on_device; });
}

namespace {

struct Knobs {
  int prefetch = 1;
  int gradient_buffers = 1;
  bool keep_gradients = false;
  bool send_sums = false;
  bool small_pieces = true;
  int resident_layers = 0;
};

void check(const ParameterLayout& layout, const OffloadOptions& options) {
  if (layout.layer_count() == 0) throw MisuseError("the layout has no layers");
  if (options.subgroup_size < 0) throw UsageError("subgroup size is negative");
  if (options.max_micro_batches < 1) throw UsageError("micro-batches per step must be at least 1");
  if (options.micro_batches_at_once < 1) throw UsageError("micro-batches at once must be at least 1");
  if (options.update_threads < 0) throw UsageError("update threads are negative");
  if (options.resident_layers > layout.layer_count()) {
    throw UsageError(fmt::format("{} resident layers", options.resident_layers),
                     fmt::format("the model has {}", layout.layer_count()));
  }
  if (options.policy.kind == Policy::Kind::device && options.resident_layers >= 0 &&
      options.resident_layers < layout.layer_count()) {
    throw UsageError("policy 'device' keeps every layer on the device",
                     fmt::format("but {} resident layers were asked for", options.resident_layers),
                     "leave out one of them");
  }
}

Plan build(const ParameterLayout& layout, const OffloadOptions& options, const Knobs& knobs) {
  PlanBuilder builder(layout, options);
  builder.divide_state();
  builder.place_weights(knobs.resident_layers, knobs.prefetch, knobs.gradient_buffers);
  builder.place_gradients(knobs.keep_gradients, knobs.send_sums);
  builder.book_memory(knobs.small_pieces);
  return std::move(builder).take();
}

/// The least demanding plan that the options allow.
Knobs smallest_knobs(const ParameterLayout& layout, const OffloadOptions& options) {
  Knobs knobs;
  if (options.prefetch_layers > 0) knobs.prefetch = options.prefetch_layers;
  if (options.resident_layers >= 0) knobs.resident_layers = options.resident_layers;
  if (options.policy.kind == Policy::Kind::device) knobs.resident_layers = layout.layer_count();
  return knobs;
}

/// Spends spare device memory where it saves most: first what lets copies overlap, then gradients that
/// need not travel, then layers that need not be fetched.
Plan improve(const ParameterLayout& layout, const OffloadOptions& options, Knobs knobs, Plan plan, std::size_t budget) {
  const auto attempt = [&](const Knobs& candidate) {
    Plan better = build(layout, options, candidate);
    if (better.memory.device_bytes() > budget) return false;
    plan = std::move(better);
    knobs = candidate;
    return true;
  };
  Knobs wish = knobs;
  wish.small_pieces = false;
  if (!attempt(wish)) wish = knobs;
  wish.gradient_buffers = 2;
  if (!attempt(wish)) wish = knobs;
  wish.send_sums = true;
  if (!attempt(wish)) wish = knobs;
  if (options.prefetch_layers == 0) {
    wish.prefetch = 2;
    if (!attempt(wish)) wish = knobs;
  }
  wish.keep_gradients = true;
  if (!attempt(wish)) wish = knobs;
  if (options.resident_layers < 0 && options.policy.kind != Policy::Kind::device) {
    int low = knobs.resident_layers;  // fits
    int high = layout.layer_count();
    while (low < high) {
      wish.resident_layers = (low + high + 1) / 2;
      if (attempt(wish)) {
        low = wish.resident_layers;
      } else {
        high = wish.resident_layers - 1;
      }
    }
  }
  return plan;
}

std::size_t ceiling_of(const OffloadOptions& options, const PlanningFacts& facts) {
  return options.device_memory > 0 ? options.device_memory : facts.device_capacity + facts.device_reserved;
}

std::string megabytes_flag(std::size_t bytes) {
  constexpr std::size_t mib = std::size_t{1} << 20;
  return fmt::format("{}MiB", (bytes + mib - 1) / mib);
}

OffloadOptions with_policy(OffloadOptions options, std::string_view policy) {
  options.policy = parse_policy(policy);
  return options;
}

[[noreturn]] void refuse_device(const ParameterLayout& layout, const OffloadOptions& options, const Plan& smallest,
                                std::size_t ceiling) {
  const std::size_t need = smallest.memory.device_bytes() + options.reserved_device_memory;
  std::string advice = fmt::format("try --device-memory {}", megabytes_flag(need));
  OffloadOptions frugal = with_policy(options, "host");
  frugal.resident_layers = 0;
  frugal.prefetch_layers = 1;
  const std::size_t least = smallest_device_memory(layout, frugal);
  if (least <= ceiling && least < need) {
    advice += fmt::format(", or --policy host --resident-layers 0 --prefetch-layers 1 (needs {})", format_bytes(least));
  } else if (least < need) {
    advice += fmt::format(", or --policy host --resident-layers 0 --prefetch-layers 1 --device-memory {}",
                          megabytes_flag(least));
  }
  throw PlanError("the plan does not fit on the device",
                  fmt::format("policy {} needs at least {}, the ceiling is {}", smallest.policy.text(),
                              format_bytes(need), format_bytes(ceiling)),
                  advice, smallest.table());
}

Plan plan_fixed(const ParameterLayout& layout, const OffloadOptions& options, std::size_t ceiling) {
  const Knobs knobs = smallest_knobs(layout, options);
  Plan plan = build(layout, options, knobs);
  const std::size_t budget = ceiling > options.reserved_device_memory ? ceiling - options.reserved_device_memory : 0;
  if (plan.memory.device_bytes() > budget) refuse_device(layout, options, plan, ceiling);
  plan = improve(layout, options, knobs, std::move(plan), budget);
  plan.device_memory = ceiling;
  plan.reserved_device_memory = options.reserved_device_memory;
  return plan;
}

/// As much of the state on the device as fits.
Plan plan_automatic(const ParameterLayout& layout, const OffloadOptions& options, std::size_t ceiling) {
  std::vector<std::string> candidates{"device"};
  for (int tenths = 1; tenths < 10; ++tenths) candidates.push_back(fmt::format("static:{}", tenths / 10.0));
  candidates.emplace_back("host");
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const OffloadOptions fixed = with_policy(options, candidates[i]);
    if (i == 0 && options.resident_layers >= 0 && options.resident_layers < layout.layer_count()) continue;
    if (i + 1 < candidates.size() && smallest_device_memory(layout, fixed) > ceiling) continue;
    Plan plan = plan_fixed(layout, fixed, ceiling);
    plan.chosen_by_auto = true;
    return plan;
  }
  throw MisuseError("no policy is left to try");
}

void check_host(const OffloadOptions& options, const PlanningFacts& facts, const Plan& plan) {
  const std::size_t need = plan.memory.host_bytes();
  if (options.host_memory > 0 && need > options.host_memory) {
    throw PlanError(
        "the plan does not fit in host memory",
        fmt::format("it needs {}, the ceiling is {}", format_bytes(need), format_bytes(options.host_memory)),
        fmt::format("try --host-memory {}", megabytes_flag(need)), plan.table());
  }
  if (facts.host_available > 0 && need > facts.host_available) {
    throw PlanError("the plan does not fit in host memory",
                    fmt::format("it needs {}, {} is available", format_bytes(need), format_bytes(facts.host_available)),
                    "use a smaller model, or a policy that keeps more on the device", plan.table());
  }
}

}  // namespace

Plan make_plan(const ParameterLayout& layout, const OffloadOptions& given, const PlanningFacts& facts) {
  check(layout, given);
  const std::size_t ceiling = ceiling_of(given, facts);
  OffloadOptions options = given;
  options.reserved_device_memory += facts.device_reserved;
  Plan plan = options.policy.kind == Policy::Kind::automatic ? plan_automatic(layout, options, ceiling)
                                                             : plan_fixed(layout, options, ceiling);
  plan.reserved_device_memory = given.reserved_device_memory;
  plan.device_reserved = facts.device_reserved;
  check_host(options, facts, plan);
  return plan;
}

std::size_t smallest_device_memory(const ParameterLayout& layout, const OffloadOptions& options) {
  check(layout, options);
  const OffloadOptions fixed = options.policy.kind == Policy::Kind::automatic ? with_policy(options, "host") : options;
  return build(layout, fixed, smallest_knobs(layout, fixed)).memory.device_bytes() + options.reserved_device_memory;
}

}  // namespace tandem
