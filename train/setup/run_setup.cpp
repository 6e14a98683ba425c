#include "train/setup/run_setup.hpp"

#include <fmt/format.h>
#include <linux/magic.h>
#include <spdlog/spdlog.h>
#include <sys/statfs.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>

#include "api/state_io.hpp"
#include "core/base/direct_buffer.hpp"
#include "core/base/error.hpp"
#include "core/base/version.hpp"
#include "core/device/device_name.hpp"
#include "core/host/topology.hpp"
#include "io/atomic_file.hpp"
#include "offload/state_access.hpp"
#include "offload/state_file.hpp"
#include "scheduler/plan/plan_builder.hpp"
#include "scheduler/plan/rank_slice.hpp"
#include "scheduler/search/replan.hpp"
#include "scheduler/tasks/traffic.hpp"
#include "train/hf/model_source.hpp"
#include "train/setup/fastest_shape.hpp"
#include "train/setup/host_batch.hpp"
#include "train/setup/performance.hpp"

namespace tandem {
namespace {

/// What libraries take once a run goes: kernels that oneDNN compiles (3.4 MB of it), stacks, and for each thread what a
/// matrix product packs (a MiB at a time) and its heap keeps. It cannot be known before; of one to four threads and
/// 64 to 1,024 rows, 3 to 16 MB were seen, the most with two threads. Beside a GPU it is what driver, cuBLASLt and
/// cuDNN keep of kernels that they load and compile when these are first asked for: 146 MiB were seen without cuDNN and
/// 155 with it.
std::size_t libraries_in_use(const DeviceInfo& device) noexcept {
  constexpr std::size_t beside_a_gpu = 192;
  const std::size_t mib = device.kind == "host" ? 8 + 6 * static_cast<std::size_t>(device.threads) : beside_a_gpu;
  return mib << 20;
}

/// What the engine knows of a subgroup: itself, who used it last, its tasks of a step and what they wait for. Lists
/// grow by doubling; 0.9 to 1.9 KB were seen, most where it is streamed.
constexpr std::size_t bytes_of_subgroup = 2048;

struct HostRows {
  std::size_t program = 0;  ///< what the process held before: code's own data, libraries, threads
  std::size_t batches = 0;
  std::size_t digest = 0;
  std::size_t conversion = 0;  ///< of state that is not stored as fp32, while it is read or written
  std::size_t checkpoint = 0;
  std::size_t writer = 0;
  std::size_t activations = 0;
  std::size_t libraries = 0;
  std::size_t subgroups = 0;  ///< the engine's lists of them and of their tasks
  std::size_t file = 0;       ///< blocks of state in a file, while it is read or written
  std::size_t total() const noexcept {
    return program + libraries + subgroups + batches + digest + conversion + file + checkpoint + writer + activations;
  }
};

/// The rows that follow from layout and formats.
HostRows host_rows(const RunSetup& run, const RunShape& shape, const RunPurpose& purpose) {
  constexpr std::size_t piece = std::size_t{1} << 20;  // values that the engine hands out at a time
  HostRows rows;
  rows.program = sample_process_memory().anonymous;
  rows.libraries = libraries_in_use(run.device->info());
  rows.batches = host_batch_bytes(shape, run.batch_slots);
  if (!purpose.training) return rows;
  rows.subgroups = static_cast<std::size_t>(subgroup_count(run.layout, run.options)) * bytes_of_subgroup;
  const std::size_t largest = largest_parameter(run.layout);
  const auto in_parts = [&, threads = static_cast<std::size_t>(run.device->host_kernels().threads())](std::size_t n) {
    return threads * std::min(n, static_cast<std::size_t>(StateAccess::part_elements));
  };
  rows.digest = in_parts(largest) * sizeof(float);
  for (const Parameter* p : run.layout.owned_parameters()) {
    // Weights, and beside them residuals or moments: 16 bits each.
    const std::size_t width = run.options.state != StateFormat::fp32 ? 4 : p->options.trainable ? 0 : 2;
    const auto count = static_cast<std::size_t>(p->count);
    rows.conversion = std::max(rows.conversion, std::max(std::min(count, piece), in_parts(count)) * width);
  }
  // For each thread that reads parts for a digest; one for a save's larger ones.
  if (!run.options.state_folder.empty()) {
    rows.file = rows.digest + static_cast<std::size_t>(run.device->host_kernels().threads()) * 2 * direct_block_bytes +
                StateFile::buffer_bytes;
  }
  // What is loaded passes in pieces too, at another time.
  if (purpose.saves || purpose.resumes) rows.checkpoint = save_buffer_values(run.layout) * sizeof(float);
  const bool large = way_of_file(StateCopy::bytes(run.layout)) == FileWay::direct;
  if ((purpose.saves || purpose.resumes) && large) rows.writer = large_file_buffers;
  return rows;
}

/// What is known of the machine's speed.
struct Speeds {
  std::optional<MachineProfile> profile;
  LayerSeconds slower;
  bool matter = true;  ///< false: where it is enough to know what fits
};

/// Model and plan of one shape.
struct Way {
  std::unique_ptr<Transformer> model;
  std::size_t activation_bytes = 0;
  OffloadOptions options;
  Plan plan;
  std::vector<LayerSeconds> compute;  ///< where speeds are known
  std::optional<Choice> choice;       ///< where speeds are known
  std::string why;                    ///< this many micro-batches pass through a layer at once
};

/// Pinned memory that is not the plan's.
std::size_t pinned_bytes(const Transformer& model, const Ops& ops, const HostRows& rows) {
  std::size_t bytes = rows.batches;
  for (const auto& entry : model.memory(ops)) {
    if (entry.place == Place::pinned) bytes += align_up(entry.bytes);
  }
  return bytes;
}

/// All but the plan. `rows`: grows by activations on the host.
Way without_plan(const RunSetup& run, const RunShape& shape, HostRows rows) {
  Way way;
  way.model = std::make_unique<Transformer>(run.model_config, shape);
  way.options = run.options;
  for (const auto& entry : way.model->memory(run.device->ops())) {
    (entry.place == Place::device ? way.activation_bytes : rows.activations) += align_up(entry.bytes);
  }
  way.options.reserved_device_memory =
      way.activation_bytes +
      page_table_bytes(pinned_bytes(*way.model, run.device->ops(), rows), run.facts, run.options.rank);
  set_shape(way.options, run.model_config, shape);
  way.options.reserved_host_memory = rows.total();
  return way;
}

bool fits(const RunSetup& run, const RunShape& shape, const HostRows& rows) {
  return find_plan(run.layout, without_plan(run, shape, rows).options, run.facts).has_value();
}

std::vector<LayerSeconds> compute_of(const RunSetup& run, const RunShape& shape, const Speeds& speeds) {
  std::vector<LayerSeconds> compute = compute_seconds(*speeds.profile, work_of(run.model_config, shape));
  for (LayerSeconds& s : compute) s = {s.forward * speeds.slower.forward, s.backward * speeds.slower.backward};
  return compute;
}

/// The predicted fastest. Throws PlanError.
Way plan_by_speed(const RunSetup& run, const RunShape& first, const HostRows& rows, const TrainConfig& config,
                  const Speeds& speeds) {
  ShapeMachine machine;
  machine.compute = [&](const RunShape& shape) { return compute_of(run, shape, speeds); };
  machine.fits = [&](const RunShape& shape) { return fits(run, shape, rows); };
  machine.choose = [&](const RunShape& shape, std::span<const LayerSeconds> layers, double faster_than) {
    const Way way = without_plan(run, shape, rows);
    return choose_plan(run.layout, way.options, run.facts, *speeds.profile, layers, {.faster_than = faster_than});
  };
  FastestShape best = fastest_shape(config, run.model_config, first, machine);
  Way way = without_plan(run, best.shape, rows);
  way.plan = best.choice.plan;
  way.compute = std::move(best.compute);
  way.choice = std::move(best.choice);
  way.why = std::move(best.why);
  return way;
}

/// Bytes across the link in a step of the steady state.
std::uint64_t bytes_of_step(const RunSetup& run, const Plan& plan) {
  const Traffic traffic = traffic_of_step(run.layout, plan, plan.max_micro_batches);
  return traffic.host_to_device + traffic.device_to_host;
}

Way with_plan(const RunSetup& run, const RunShape& shape, const HostRows& rows) {
  Way way = without_plan(run, shape, rows);
  way.plan = make_plan(run.layout, way.options, run.facts);
  return way;
}

/// With so many micro-batches through each layer at once; none where they do not fit.
std::optional<Way> several_at_once(const RunSetup& run, RunShape shape, const HostRows& rows, std::int64_t count) {
  shape.micro_batches = count;
  try {
    return with_plan(run, shape, rows);
  } catch (const PlanError&) {
    return {};
  }
}

/// As many micro-batches through each layer at once as fit, where one at a time does not, or where something crosses
/// the link for each of them and fewer bytes do so. Throws PlanError.
Way order_by_bytes(const RunSetup& run, const RunShape& shape, const HostRows& rows, const TrainConfig& config,
                   const Speeds& speeds) {
  std::optional<Way> one;
  try {
    one = with_plan(run, shape, rows);
  } catch (const PlanError&) {  // sums of gradients on the host may be what is too much
    for (const std::int64_t count : more_at_once(config, shape)) {
      one = several_at_once(run, shape, rows, count);
      if (!one) continue;
      one->why = one_does_not_fit;
      return *std::move(one);
    }
    throw;
  }
  if (config.accumulation_order != AccumulationOrder::automatic) one->why = as_asked;
  if (!speeds.matter || !(one->plan.streams_weights() || one->plan.sends_gradients())) return *std::move(one);
  for (const std::int64_t count : more_at_once(config, shape)) {
    std::optional<Way> more = several_at_once(run, shape, rows, count);
    if (!more) {
      one->why = none_fit;  // or fewer do
      continue;
    }
    const std::uint64_t bytes = bytes_of_step(run, more->plan);
    const std::uint64_t before = bytes_of_step(run, one->plan);
    const std::string gain = fmt::format("{} across the link instead of {}", format_bytes(bytes), format_bytes(before));
    more->why = gain;
    one->why = "by layer: " + gain;
    return *std::move(bytes < before ? more : one);
  }
  return *std::move(one);
}

/// The way of keeping activations that keeps most of those that fit. Throws PlanError, of the way that needs least,
/// where none does.
Way plan_by_bytes(const RunSetup& run, RunShape shape, const HostRows& rows, const TrainConfig& config,
                  const Speeds& speeds) {
  const ModelConfig& model = run.model_config;
  const ShapeFits fitting = [&](const RunShape& s) { return fits(run, s, rows); };
  while (!fitting(shape) && keep_less(config, model, shape)) {
  }
  const bool open = !config.recompute && !shape.offload_inputs;
  if (open && shape.recomputed_blocks > 0) {
    shape.selective = true;
    shape.recomputed_blocks = fewest_recomputed(model, shape, fitting);
  }
  return order_by_bytes(run, shape, rows, config, speeds);
}

void take(RunSetup& run, Way way, const Speeds& speeds) {
  run.model = std::move(way.model);
  run.activation_bytes = way.activation_bytes;
  run.options = way.options;
  run.plan = std::move(way.plan);
  if (run.model->shape().training) run.order = order_text(run.plan, way.why);
  if (way.choice) {
    run.prediction = {.profile = *speeds.profile, .compute = std::move(way.compute), .choice = *std::move(way.choice)};
  }
}

void book(RunSetup& run, const HostRows& rows) {
  run.memory = run.plan.memory;
  for (const auto& entry : run.model->memory(run.device->ops())) {
    run.memory.add(entry.name, "run", entry.place, entry.bytes);
  }
  run.memory.add("device context and libraries", "run", Place::device, run.device->info().reserved);
  const std::size_t others = pinned_bytes(*run.model, run.device->ops(), rows);
  run.page_tables = run.plan.page_tables + page_table_bytes(others, run.facts, run.options.rank);
  run.memory.add("page tables of pinned memory", "run", Place::device, run.page_tables);
  run.memory.add("program and libraries", "run", Place::pageable, rows.program);
  run.memory.add("libraries in use", "run", Place::pageable, rows.libraries);
  run.memory.add("lists of subgroups", "run", Place::pageable, rows.subgroups);
  run.memory.add("batches", "run", Place::pinned, rows.batches);
  run.memory.add("digest buffer", "save", Place::pageable, rows.digest);
  run.memory.add("state conversion", "save", Place::pageable, rows.conversion);
  run.memory.add("state file buffers", "save", Place::pageable, rows.file);
  run.memory.add("checkpoint buffer", "save", Place::pageable, rows.checkpoint);
  run.memory.add("checkpoint writer", "save", Place::pageable, rows.writer);
}

/// A copy of the state, so that no update waits while it is written, where there is room for it. Each rank books its
/// part of what the process has once.
void book_copy(RunSetup& run) {
  const std::size_t copy = part_of_rank(StateCopy::bytes(run.layout), run.options.rank);
  PlanningFacts facts = run.facts;
  // Without a ceiling a margin is left for everybody else.
  if (run.options.host_memory == 0) facts.host_available -= facts.host_available / 10;
  const auto with_copy = [&](MemoryPlan memory) {
    std::erase_if(memory.entries, [](const MemoryEntry& e) { return e.name == "checkpoint buffer"; });
    memory.add("checkpoint copy", "run", Place::pageable, copy);
    return memory;
  };
  MemoryPlan first = with_copy(run.memory);
  if (over_host_memory(run.options, facts, first.host_bytes(), first.device_bytes()) > 0) return;
  run.memory = std::move(first);
  for (RunSetup& peer : run.peers) peer.memory = with_copy(std::move(peer.memory));
  run.saving.copies = true;
}

void book_saving(RunSetup& run, const TrainConfig& config) {
  run.saving.every = config.checkpoint_every;
  book_copy(run);
  if (!run.prediction) return;
  const RunPrediction& known = *run.prediction;
  run.saving.slowdown = predict_saving(run.saving, run.layout, run.plan, known.profile, known.compute);
}

/// What planning is to know, of a process that holds `program` bytes of the machine's memory already.
PlanningFacts facts_of(const Device& device, const Topology& machine, std::size_t program) {
  PlanningFacts facts = profile_of(device, machine);
  if (facts.host_available > 0) facts.host_available += program;
  if (facts.host_limit > 0) facts.host_limit = std::min(facts.host_limit + program, machine.memory_bytes);
  return facts;
}

/// Where state would take the memory that it is to leave.
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
void warn_of_insistence(const RunSetup& run) {
  const std::size_t host = run.planned_host_bytes();
  const std::size_t devices = run.planned_device_bytes() * static_cast<std::size_t>(run.ranks());
  const std::size_t all = run.facts.device_is_host ? host + devices : host;
  if (run.facts.host_available == 0 || all <= run.facts.host_available) return;
  spdlog::warn("{} of host memory are planned, by --host-memory, and {} are available now", format_bytes(all),
               format_bytes(run.facts.host_available));
}

/// Of one kind: what they compute is to have the same bits, whichever computes it.
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

/// The same run on another rank's device.
RunSetup peer_of(const RunSetup& first, Rank rank, std::unique_ptr<Device> device, const HostRows& rows) {
  RunSetup peer;
  peer.model_config = first.model_config;
  peer.layout = first.layout;
  peer.device = std::move(device);
  peer.model = std::make_unique<Transformer>(first.model_config, first.model->shape());
  peer.options = first.options;
  peer.options.rank = rank;
  peer.facts = first.facts;
  peer.plan = plan_of_rank(peer.layout, peer.options, first.plan);
  peer.activation_bytes = first.activation_bytes;
  peer.batch_slots = first.batch_slots;
  book(peer, rows);
  return peer;
}

}  // namespace

DeviceOptions device_options(const TrainConfig& c) {
  return {.memory = c.device_memory,
          .threads = c.threads,
          .update_threads = c.update_threads,
          .numa_node = c.numa_node,
          .link_bytes_per_second = c.link_bandwidth,
          .update_parameters_per_second = c.update_rate,
          .strict = c.strict,
          .notice = [](const std::string& why) { spdlog::info("device: host, as {}", why); },
          .warning = [](const std::string& what) { spdlog::warn("{}", what); }};
}

std::filesystem::path state_folder(const TrainConfig& config) {
  if (config.state_dir.empty() || std::filesystem::is_directory(config.state_dir)) return config.state_dir;
  throw UsageError(fmt::format("--state-dir {}", config.state_dir), "there is no such folder",
                   "make it, on a disk that is fast");
}

void require_file_rates(const TrainConfig& config, const MachineProfile& profile) {
  if (config.state_dir.empty() || profile.knows_file()) return;
  throw UsageError("--state-dir", fmt::format("profile {} does not say how fast a file is", profile.name),
                   "give it read, write and both_ways of file, in B/s");
}

OffloadOptions offload_options(const TrainConfig& c) {
  OffloadOptions o;
  o.state_folder = c.state_dir;
  o.device_memory = c.device_memory;
  o.host_memory = c.host_memory;
  o.policy = c.policy;
  o.subgroup_size = c.subgroup_size;
  o.resident_layers = c.resident_layers;
  o.prefetch_layers = c.prefetch_layers;
  o.max_micro_batches = static_cast<int>(c.grad_accum);
  o.update_threads = c.update_threads;
  o.state = c.state;
  o.seed = c.seed;
  o.adamw.beta1 = c.beta1;
  o.adamw.beta2 = c.beta2;
  o.adamw.eps = c.eps;
  o.adamw.weight_decay = c.weight_decay;
  o.on_nonfinite = c.on_nonfinite;
  return o;
}

DType compute_type(const TrainConfig& config, std::string_view device_kind) {
  if (device_kind == "host") return config.compute.value_or(DType::f32);
  if (config.compute == DType::f32) {
    throw UsageError("--compute fp32", "on a GPU tandem computes in bf16, with fp32 sums",
                     "leave it out, or use --device host");
  }
  return DType::bf16;
}

Recompute recompute_of(const TrainConfig& config, const ModelConfig& model) {
  const Recompute asked = config.recompute.value_or(Recompute{.blocks = config.offload_activations ? all_blocks : 0});
  if (asked.blocks == all_blocks || asked.blocks == model.layers) return {.blocks = model.layers};
  if (asked.blocks > model.layers) {
    throw UsageError(fmt::format("--recompute block:{}{}", asked.blocks, asked.selective ? ",selective" : ""),
                     fmt::format("{} has {} blocks", model.name, model.layers),
                     fmt::format("use at most --recompute block:{}", model.layers));
  }
  if (config.offload_activations) {
    throw UsageError("--offload-activations", "--recompute keeps the activations of some blocks",
                     "leave out one of them");
  }
  return asked;
}

void set_shape(OffloadOptions& options, const ModelConfig& model, const RunShape& shape) {
  options.micro_batches_at_once = static_cast<int>(shape.micro_batches);
  options.owners_make_gradients = makes_table_last(model, shape);
  options.offloaded_input_bytes = offloaded_input_bytes(model, shape);
}

RunShape run_shape(const TrainConfig& config, const ModelConfig& model, DType compute, bool training) {
  const Recompute recompute = recompute_of(config, model);
  return {.batch = config.micro_batch,
          .sequence = config.seq_len,
          .micro_batches = training && config.accumulation_order == AccumulationOrder::layer ? config.grad_accum : 1,
          .compute = compute,
          .recomputed_blocks = recompute.blocks,
          .selective = recompute.selective,
          .training = training,
          .offload_inputs = config.offload_activations && training};
}

ParameterLayout training_layout(const TrainConfig& config, const ModelConfig& model, const RunShape& shape) {
  return frozen_layout(model, config.freeze, ends_gradient(model, shape));
}

std::int64_t sequence_length(const TrainConfig& config, const ModelConfig& model) {
  constexpr std::int64_t longest_default = 1024;
  if (config.seq_len == 0) return std::min(longest_default, model.positions);
  if (config.seq_len > model.positions) {
    throw UsageError(fmt::format("--seq-len {}", config.seq_len),
                     fmt::format("{} has {} positions", model.name, model.positions),
                     fmt::format("use at most --seq-len {}", model.positions));
  }
  return config.seq_len;
}

TrainConfig config_of_rank(TrainConfig config) {
  const auto ranks = static_cast<std::int64_t>(split_device_names(config.device).size());
  if (config.grad_accum % ranks != 0) {
    throw UsageError(fmt::format("--grad-accum {}", config.grad_accum),
                     fmt::format("{} devices share the micro-batches of a step", ranks),
                     fmt::format("use a multiple of {}", ranks));
  }
  config.grad_accum /= ranks;
  return config;
}

RunSetup set_up_run(const TrainConfig& of_all, const ModelConfig& model, RunPurpose purpose) {
  if (!purpose.training) require_one_device(of_all.device, "what does not train");
  const std::vector<std::string> devices = split_device_names(of_all.device);
  const Rank first{0, static_cast<int>(devices.size())};
  const TrainConfig config = config_of_rank(of_all);
  RunSetup run;
  run.model_config = model;
  run.options = offload_options(config);
  run.options.rank = first;
  std::vector<std::unique_ptr<Device>> opened = open_alike(devices, device_options(config));
  run.device = std::move(opened.front());
  run.batch_slots = purpose.training ? static_cast<std::size_t>(config.grad_accum) : 1;
  const RunShape shape = run_shape(config, model, compute_type(config, run.device->info().kind), purpose.training);
  run.layout = purpose.training ? training_layout(config, model, shape) : forward_layout(model);
  HostRows rows = host_rows(run, shape, purpose);
  const std::size_t held = std::exchange(rows.program, part_of_rank(rows.program, first));
  run.facts = facts_of(*run.device, purpose.machine != nullptr ? *purpose.machine : read_topology(), held);
  if (const std::filesystem::path folder = state_folder(config); !folder.empty()) {
    run.facts.file_room = room_in(folder);
    if (purpose.predicts) warn_of_memory_as_disk(folder);
  }
  Speeds speeds{std::nullopt, purpose.slower, purpose.predicts};
  if (purpose.profile != nullptr) {
    require_file_rates(config, *purpose.profile);
    speeds.profile = *purpose.profile;
  } else if (purpose.training && purpose.predicts) {
    if (const auto measured = find_calibration(*run.device)) {
      run.doubts = doubts(*measured);
      if (config.state_dir.empty() || measured->knows_file()) {
        speeds.profile = as_emulated(*measured, config);
      } else {
        spdlog::warn(
            "nothing is predicted: the calibration does not say how fast a file is; run tandem calibrate again");
      }
    }
  }
  if (speeds.profile) speeds.profile = shared_by(*std::move(speeds.profile), first.count);
  Way way = speeds.profile ? plan_by_speed(run, shape, rows, config, speeds)
                           : plan_by_bytes(run, shape, rows, config, speeds);
  take(run, std::move(way), speeds);
  if (run.may_replan()) {
    book_room_for_change(run.plan, run.layout, run.options, run.facts);
  }
  book(run, rows);
  for (std::size_t i = 1; i < opened.size(); ++i) {
    run.peers.push_back(peer_of(run, {static_cast<int>(i), first.count}, std::move(opened[i]), rows));
  }
  if (purpose.saves && config.checkpoint_every > 0) book_saving(run, config);
  if (purpose.predicts) warn_of_insistence(run);
  return run;
}

}  // namespace tandem
