#include "train/setup/run_setup.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <linux/magic.h>
#include <spdlog/spdlog.h>
#include <sys/statfs.h>

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/version.hpp"
#include "core/device/device_name.hpp"
#include "core/host/topology.hpp"
#include "core/ops/ops.hpp"
#include "train/setup/performance.hpp"
#include "train/setup/run_request.hpp"
#include "train/setup/shared_machine.hpp"

namespace tandem {
namespace {

/// Facts for planning, in a process that holds `program` bytes of the machine's memory already.
PlanningFacts facts_of(const Device& device, const Topology& machine, std::size_t program) {
  PlanningFacts facts = profile_of(device, machine);
  if (facts.host_available > 0) facts.host_available += program;
  if (facts.host_limit > 0) facts.host_limit = std::min(facts.host_limit + program, machine.memory_bytes);
  return facts;
}

/// Warns where the folder is in memory, which state is to leave.
void warn_of_memory_as_disk(const std::filesystem::path& folder) {
  struct statfs system {};
  if (::statfs(folder.c_str(), &system) != 0) return;
  if (system.f_type != TMPFS_MAGIC && system.f_type != RAMFS_MAGIC) return;
  spdlog::warn("--state-dir {} is on no disk: it is memory, and the plan counts on that for other things",
               folder.string());
}

/// Bytes that are free there, and at least 1, as 0 stands for what is unknown. Throws WriteError.
std::size_t room_in(const std::filesystem::path& folder) {
  std::error_code error;
  const std::filesystem::space_info space = std::filesystem::space(folder, error);
  if (!error) return std::max<std::size_t>(1, space.available);
  throw WriteError(fmt::format("cannot tell the free space of {}", folder.string()), error.message());
}

/// A ceiling may insist on memory that nobody has free at the moment.
void warn_of_insistence(const RunPlan& run) {
  const std::size_t host = run.planned_host_bytes();
  const std::size_t devices = run.planned_device_bytes() * static_cast<std::size_t>(run.ranks());
  const std::size_t all = run.facts.device_is_host ? host + devices : host;
  if (run.facts.host_available == 0 || all <= run.facts.host_available) return;
  spdlog::warn("{} of host memory are planned, by --host-memory, and {} are available now", format_bytes(all),
               format_bytes(run.facts.host_available));
}

/// Opens devices of one kind: the same work must have the same bits on each.
std::vector<std::unique_ptr<Device>> open_alike(const std::vector<std::string>& names, const DeviceOptions& options) {
  std::vector<std::unique_ptr<Device>> devices;
  for (const std::string& name : names) {
    devices.push_back(open_device(name, options));
    const DeviceInfo &first = devices.front()->info(), &other = devices.back()->info();
    if (other.compute_key == first.compute_key) continue;
    throw UsageError(fmt::format("devices {} and {}", first.name, other.name),
                     "they are of different kinds, on which the same work has other bits", "use devices of one kind");
  }
  return devices;
}

/// Rates of this machine as calibrated, or as the caller knows them; none where nothing is predicted. `doubts`: about a
/// calibration that is used.
std::optional<MachineProfile> rates_of(const Device& device, const TrainConfig& config, const RunPurpose& purpose,
                                       const MachineProfile* known, std::vector<std::string>& doubts_of_it) {
  if (known != nullptr) {
    require_file_rates(config, *known);
    return *known;
  }
  if (!purpose.training || !purpose.predicts) return std::nullopt;
  const std::optional<MachineProfile> measured = find_calibration(device);
  if (!measured) return std::nullopt;
  doubts_of_it = doubts(*measured);
  if (config.state_dir.empty() || measured->knows_file()) return as_emulated(*measured, config);
  spdlog::warn("nothing is predicted: the calibration does not say how fast a file is; run tandem calibrate again");
  return std::nullopt;
}

/// An open device and this machine, as a run is planned for them.
RunMachine machine_of(Device& device, const TrainConfig& config, const RunPurpose& purpose, const Topology& host) {
  RunMachine machine;
  machine.device_kind = device.info().kind;
  machine.device_threads = device.info().threads;
  machine.update_threads = device.host_kernels().threads();
  machine.ops = &device.ops();
  machine.program_bytes = program_bytes(machine.device_kind, sample_process_memory().anonymous);
  // The program's bytes count as held already: what is assumed of the program then takes no more of the free memory
  // than it does.
  machine.facts = facts_of(device, host, machine.program_bytes);
  if (const std::filesystem::path folder = state_folder(config); !folder.empty()) {
    machine.facts.file_room = room_in(folder);
    if (purpose.predicts) warn_of_memory_as_disk(folder);
  }
  return machine;
}

RunSetup setup_of(RunPlan plan, std::unique_ptr<Device> device) {
  RunSetup run;
  static_cast<RunPlan&>(run) = std::move(plan);
  run.device = std::move(device);
  run.model = std::make_unique<Transformer>(run.model_config, run.shape);
  return run;
}

/// Plan of this process' rank, out of the first's.
RunPlan part_of(RunPlan plan, Rank rank) {
  if (rank.index == 0) return plan;
  RunPlan own = std::move(plan.other_ranks.at(static_cast<std::size_t>(rank.index) - 1));
  own.saving = plan.saving;
  return own;
}

/// The run of one of several processes. The first one looks at the disk, and has all plans for the table.
RunSetup setup_of_process(const TrainConfig& config, const ModelConfig& model, const RunPurpose& purpose,
                          RunMachine own, std::unique_ptr<Device> device, Processes& processes) {
  SharedMachine shared = machine_of_all(processes, std::move(own), device->info());
  RunPlan plan = plan_run(config, model, purpose, shared.machine);
  if (plan.checkpoints && processes.is_first()) look_at_disk(*plan.checkpoints, config.out);
  if (processes.is_first()) warn_of_insistence(plan);
  RunSetup run = setup_of(part_of(std::move(plan), processes.rank()), std::move(device));
  run.processes = &processes;
  run.names_of_all = std::move(shared.device_names);
  return run;
}

}  // namespace

RunSetup set_up_run(const TrainConfig& config, const ModelConfig& model, const RunPurpose& purpose,
                    const KnownMachine& known) {
  if (!purpose.training) require_one_device(config.device, "what does not train");
  const int processes = known.processes == nullptr ? 1 : known.processes->rank().count;
  static_cast<void>(config_of_rank(config, processes));  // refuses micro-batches that have no equal parts
  const std::vector<std::string> names = split_device_names(config.device);
  DeviceOptions options = device_options(config);
  if (processes > 1) options.ordinal = known.processes->local_rank();
  std::vector<std::unique_ptr<Device>> devices = open_alike(names, options);
  RunMachine machine = machine_of(*devices.front(), config, purpose, known.host ? *known.host : read_topology());
  std::vector<std::string> doubts_of_rates;
  machine.profile = rates_of(*devices.front(), config, purpose, known.profile, doubts_of_rates);
  machine.slower = known.slower;
  if (processes > 1) {
    return setup_of_process(config, model, purpose, std::move(machine), std::move(devices.front()), *known.processes);
  }
  if (machine.profile) machine.profile = shared_by(*std::move(machine.profile), static_cast<int>(names.size()));
  RunPlan plan = plan_run(config, model, purpose, machine);
  if (plan.checkpoints) look_at_disk(*plan.checkpoints, config.out);
  if (purpose.predicts) warn_of_insistence(plan);
  std::vector<RunPlan> others = plan.other_ranks;
  RunSetup run = setup_of(std::move(plan), std::move(devices.front()));
  run.doubts = std::move(doubts_of_rates);
  for (std::size_t i = 0; i < others.size(); ++i) {
    run.peers.push_back(setup_of(std::move(others[i]), std::move(devices[i + 1])));
  }
  return run;
}

std::string RunSetup::device_names() const {
  if (!names_of_all.empty()) return fmt::format("{}", fmt::join(names_of_all, ", "));
  std::string names = device->info().name;
  for (const RunSetup& peer : peers) names += ", " + peer.device->info().name;
  return names;
}

std::size_t RunSetup::peak_device_bytes() const {
  std::size_t peak = device->peak_bytes() + device->info().reserved + page_tables;
  for (const RunSetup& peer : peers) peak = std::max(peak, peer.peak_device_bytes());
  return peak;
}

namespace {

std::string fp8_key(const Fp8Products& how) {
  return fmt::format(", products e4m3, gradients {}{}", how.gradients == Fp8Format::e4m3 ? "e4m3" : "e5m2",
                     how.accumulation == Fp8Accumulation::fast ? ", fast accumulation" : "");
}

std::string base_key(const RunPlan& run) {
  const WeightCode code = run.base_format();
  return code == WeightCode::none ? "" : fmt::format("; base {}", base_name(code));
}

}  // namespace

std::string RunSetup::compute_key() const {
  // `split` holds what `fp32` does; only rounded moments or another optimizer make another run of it.
  const bool own_bits = rounds_moments(plan.state) || is_lion(plan.state);
  const std::string state = own_bits ? fmt::format("; state {}", name_of(plan.state)) : "";
  const char* packed = shape.packed ? "; packed" : "";
  const std::string products =
      fmt::format("compute {}{}", name_of(shape.compute), shape.fp8 ? fp8_key(*shape.fp8) : "");
  return fmt::format("tandem {}; {}; {}{}{}{}", version, device->info().compute_key, products, state, base_key(*this),
                     packed);
}

std::string RunSetup::computing() const {
  return fmt::format("compute {}{}{}", name_of(shape.compute), shape.fp8 ? fp8_key(*shape.fp8) : "", base_key(*this));
}

}  // namespace tandem
