#include "train/setup/profile_machine.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "api/ops_rules.hpp"
#include "core/base/error.hpp"
#include "core/device/cuda_memory.hpp"
#include "core/device/device_name.hpp"
#include "train/setup/performance.hpp"
#include "train/setup/run_request.hpp"

namespace tandem {
namespace {

/// Bytes of a host's memory that are no run's. Elsewhere nobody can ask the system how much of it is available, so they
/// are assumed: the system's descriptions of pages (64 bytes for each of 4 KiB) and 3 GiB for firmware, services and a
/// desktop; of a small host half.
std::size_t os_reserved_bytes(std::size_t host) {
  using namespace literals;
  return std::min(host / 2, 3_GiB + host / 64);
}

PlanningFacts facts_of(const MachineProfile& profile, const TrainConfig& config, std::size_t ranks) {
  PlanningFacts facts;
  auto memory = static_cast<std::size_t>(profile.device_memory.value);
  if (config.device_memory > memory && memory > 0) {
    throw PlanError(fmt::format("--device-memory {}", format_bytes(config.device_memory)),
                    fmt::format("the device of this profile has {}", format_bytes(memory)),
                    "leave it out, or edit the profile");
  }
  if (profile.device_kind == "cuda") {
    if (config.device_memory == 0) memory = default_cuda_ceiling(memory);
    facts.device_reserved = std::min(assumed_cuda_context, memory);
    facts.pinned_per_page_table = pinned_per_cuda_page_table;
  }
  facts.device_capacity = memory - facts.device_reserved;
  const auto host = static_cast<std::size_t>(profile.host_memory.value);
  // Devices that this run does not use have their part of the host; its ranks have theirs together.
  const auto devices = ranks > 1 ? std::size_t{1} : static_cast<std::size_t>(profile.devices.value);
  facts.host_available = (host - os_reserved_bytes(host)) / devices;
  facts.host_limit = host / devices;  // a ceiling above what is left to it is believed up to here
  facts.device_is_host = profile.device_kind == "host";
  return facts;
}

int threads_of(std::int64_t asked, double all) { return asked > 0 ? static_cast<int>(asked) : static_cast<int>(all); }

}  // namespace

ProfileMachine machine_of(const MachineProfile& profile, const TrainConfig& config) {
  const std::size_t ranks = split_device_names(config.device).size();
  require_file_rates(config, profile);
  if (config.compute == ComputeType::fp8 && profile.device_kind == "cuda" && !profile.products_fp8.known()) {
    throw UsageError("--compute fp8",
                     fmt::format("profile {} has no device.products_fp8: as far as it says, the card "
                                 "multiplies no eight-bit factors",
                                 profile.name),
                     "use --compute bf16, or add the figure");
  }
  ProfileMachine made;
  RunMachine& machine = made.machine;
  machine.device_kind = profile.device_kind;
  // Scratch memory of a host goes by the threads of the device that is planned for, not of the machine that plans.
  machine.device_threads =
      threads_of(config.threads, (profile.device_threads.known() ? profile.device_threads : profile.cores).value);
  machine.update_threads = threads_of(config.update_threads, profile.cores.value);
  made.rules = rules_of(profile.device_kind, machine.device_threads);
  machine.ops = made.rules.get();
  machine.facts = facts_of(profile, config, ranks);
  machine.program_bytes = program_bytes(profile.device_kind, 0);
  machine.profile = shared_by(as_emulated(profile, config), static_cast<int>(ranks));
  return made;
}

}  // namespace tandem
