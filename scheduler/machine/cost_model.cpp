#include "scheduler/machine/cost_model.hpp"

#include <algorithm>
#include <limits>

#include "core/base/error.hpp"

namespace tandem {
namespace {

constexpr double half_bytes = 2.0;   // a bf16 weight or gradient
constexpr double round_bytes = 6.0;  // fp32 read, bf16 written
constexpr double copy_bytes = 4.0;   // bf16 read and written
constexpr double save_bytes =
    3.0;  // bytes of memory for each byte saved: out of the state, into the page cache, to the disk

/// Devices that share the host.
int devices_of(const MachineProfile& p) { return std::max(1, static_cast<int>(p.devices.value)); }

double at(ResourceShares& shares, Resource resource, double value) {
  return shares[static_cast<std::size_t>(resource)] = value;
}

/// Bytes of the device's memory for each element that is kept or added to a sum; `sums`: over several micro-batches.
double gradient_bytes(const Task& task, bool sums) {
  const bool keeps = task.kind == TaskKind::keep_gradient;
  double bytes = task.in_bf16 ? 0.0 : round_bytes;
  if (sums) {
    bytes += sum_bytes + (task.last_micro ? round_bytes : 0.0);
  } else if (task.in_bf16 && keeps) {
    bytes += copy_bytes;
  }
  if (keeps && task.last_micro) bytes += half_bytes;  // read for the norm
  return bytes;
}

/// Seconds of one resource as a linear function of the CPU's share.
struct Line {
  double all_streamed = 0.0;
  double all_cpu = 0.0;
  double operator()(double c) const { return all_streamed + (all_cpu - all_streamed) * c; }
};

/// Times of one parameter, by resource, in any order: the largest counts.
std::array<Line, 6> lines_of(const MachineProfile& p, const PathSetting& setting) {
  const PathBytes cpu = path_bytes(UpdatePath::cpu, setting);
  const PathBytes streamed = path_bytes(UpdatePath::streamed, setting);
  const double devices = devices_of(p);
  const double copied = p.copy_dram.value - 1.0;  // beyond the byte that PathBytes has of each
  const auto dram = [&](const PathBytes& of) {
    return (of.dram + copied * (of.to_device + of.to_host)) * devices / p.dram.value;
  };
  return {Line{dram(streamed), dram(cpu)},
          Line{streamed.to_device / p.to_device.value, cpu.to_device / p.to_device.value},
          Line{streamed.to_host / p.to_host.value, cpu.to_host / p.to_host.value},
          Line{(streamed.to_device + streamed.to_host) / p.both_ways.value,
               (cpu.to_device + cpu.to_host) / p.both_ways.value},
          Line{0.0, devices / p.cpu_update.value},
          Line{1.0 / p.device_update.value, 0.0}};
}

double largest(const std::array<Line, 6>& lines, double c) {
  double seconds = 0.0;
  for (const Line& line : lines) seconds = std::max(seconds, line(c));
  return seconds;
}

}  // namespace

std::string_view name_of(Resource resource) noexcept {
  switch (resource) {
    case Resource::device:
      return "compute";
    case Resource::to_device:
      return "host to device";
    case Resource::to_host:
      return "device to host";
    case Resource::link:
      return "both ways of the link";
    case Resource::dram:
      return "DRAM";
    case Resource::cores:
      return "CPU";
    case Resource::file:
      return "file";
  }
  return "unknown";
}

PathBytes path_bytes(UpdatePath path, const PathSetting& setting) noexcept {
  PathBytes bytes;
  switch (path) {
    case UpdatePath::cpu:
      // The gradient comes down, the weight goes up: pushed into a resident layer, or at its next fetch.
      bytes.to_host = half_bytes;
      bytes.to_device = half_bytes;
      bytes.dram = setting.cpu_kernel_bytes + bytes.to_host + bytes.to_device;
      return bytes;
    case UpdatePath::streamed:
      bytes.to_device = bytes.to_host = state_bytes_each(setting.state);
      if (!setting.gradient_on_device) {
        bytes.to_host += half_bytes;
        bytes.to_device += half_bytes;
      }
      if (!setting.weights_resident) {
        bytes.to_host += half_bytes;
        if (reads_weights(setting.state)) bytes.to_device += half_bytes;  // half of the master
      }
      bytes.dram = bytes.to_device + bytes.to_host;
      return bytes;
    case UpdatePath::resident:
      if (!setting.weights_resident) bytes.to_host = bytes.dram = half_bytes;
      return bytes;
  }
  return bytes;
}

double update_seconds(const MachineProfile& profile, const PathSetting& setting, double parameters, double cpu_share) {
  if (!(cpu_share >= 0.0 && cpu_share <= 1.0)) throw MisuseError("a share of the update outside 0 to 1");
  return parameters * largest(lines_of(profile, setting), cpu_share);
}

double best_cpu_share(const MachineProfile& profile, const PathSetting& setting) {
  // The maximum of lines is convex and piecewise linear: its minimum lies at an end or where two lines cross.
  const auto lines = lines_of(profile, setting);
  double best = 0.0;
  const auto consider = [&](double c) {
    if (c >= 0.0 && c <= 1.0 && largest(lines, c) < largest(lines, best)) best = c;
  };
  consider(1.0);
  for (const Line& a : lines) {
    for (const Line& b : lines) {
      const double slopes = (a.all_cpu - a.all_streamed) - (b.all_cpu - b.all_streamed);
      if (slopes != 0.0) consider((b.all_streamed - a.all_streamed) / slopes);
    }
  }
  return best;
}

double published_stride(double link, double device_update, double cpu_update, double downscale) noexcept {
  const double cpu = 1.0 / cpu_update + 1.0 / downscale - 1.0 / (2.0 * link);
  if (cpu <= 0.0) return std::numeric_limits<double>::infinity();
  return 1.0 + (3.0 / link + 1.0 / device_update) / cpu;
}

std::vector<LayerWork> matrix_work(const ParameterLayout& layout, double tokens, bool recompute) {
  std::vector<LayerWork> work;
  for (const Layer& layer : layout.layers()) {
    double weights = 0.0;
    for (const Parameter& p : layer.parameters) {
      if (p.shape.rank() > 1) weights += static_cast<double>(p.count);
    }
    LayerWork& w = work.emplace_back();
    w.forward.matmul_flops = 2.0 * tokens * weights;
    w.backward.matmul_flops = (recompute ? 6.0 : 4.0) * tokens * weights;
  }
  return work;
}

std::string_view name_of(WorkBound bound) noexcept {
  constexpr std::array<std::string_view, 4> names{"matrix products", "attention", "device memory", "launches"};
  return names[static_cast<std::size_t>(bound)];
}

WorkBound BoundSeconds::widest() const noexcept {
  return static_cast<WorkBound>(std::ranges::max_element(seconds) - seconds.begin());
}

BoundSeconds bound_seconds(const MachineProfile& p, const PassWork& work) noexcept {
  const double fp8 = p.products_fp8.known() ? p.products_fp8.value : p.matmul.value;
  return {{work.matmul_flops / p.matmul.value + work.fp8_flops / fp8, work.attention_flops / p.attention.value,
           work.memory_bytes / p.device_bandwidth.value, work.kernels * p.launch.value}};
}

std::vector<LayerSeconds> compute_seconds(const MachineProfile& p, std::span<const LayerWork> work) {
  std::vector<LayerSeconds> result;
  for (const LayerWork& w : work) {
    result.push_back({bound_seconds(p, w.forward).total(), bound_seconds(p, w.backward).total()});
  }
  return result;
}

double seconds_of_step(std::span<const LayerSeconds> compute, std::int64_t micro_batches) noexcept {
  double seconds = 0.0;
  for (const LayerSeconds& s : compute) seconds += s.forward + s.backward;
  return static_cast<double>(micro_batches) * seconds;
}

MachineProfile in_format(MachineProfile profile, StateFormat state) {
  const double smaller = update_bytes_each(state) / update_bytes_each(StateFormat::fp32);
  profile.cpu_update.value /= smaller;
  profile.device_update.value /= smaller;
  profile.cpu_update_bytes.value *= smaller;
  if (!rounds_moments(state)) return profile;
  const bool bytes = state == StateFormat::byte_moments;
  const Figure& of_core = bytes ? profile.core_byte_moments : profile.core_bf16_moments;
  const Figure& of_device = bytes ? profile.device_byte_moments : profile.device_bf16_moments;
  if (of_core.known()) {
    profile.cpu_update.value =
        std::min(profile.cpu_update.value, of_core.value * std::max(1.0, profile.cpu_update_cores.value));
  }
  if (of_device.known()) profile.device_update.value = of_device.value;
  return profile;
}

CostModel::CostModel(const MachineProfile& p, StateFormat state, int update_threads)
    : CostModel(in_format(with_update_threads(p, update_threads * devices_of(p)), state)) {
  device_update_bytes_ = update_bytes_each(state);
  record_bytes_ = 1.25;  // a code, and a quarter of a byte for what it does not give back
}

CostModel::CostModel(const MachineProfile& p)
    : device_bandwidth_(p.device_bandwidth.value),
      device_update_(p.device_update.value),
      launch_(p.launch.value),
      device_core_share_(std::min(1.0, devices_of(p) * p.device_threads.value / p.cores.value)),
      to_device_(p.to_device.value),
      to_host_(p.to_host.value),
      both_ways_(p.both_ways.value),
      latency_(p.copy_latency.value),
      copy_dram_(p.copy_dram.value),
      copy_core_share_(std::min(1.0, devices_of(p) * p.copy_cores.value / p.cores.value)),
      dram_(p.dram.value / devices_of(p)),
      host_stream_(p.host_stream.value / devices_of(p)),
      cpu_update_(p.cpu_update.value / devices_of(p)),
      cpu_core_share_(std::min(1.0, p.cpu_update_cores.value / p.cores.value)),
      cpu_update_bytes_(p.cpu_update_bytes.value),
      disk_(p.disk.value / devices_of(p)),
      disk_core_share_(std::min(1.0, p.disk_cores.value / p.cores.value)),
      file_read_(p.file_read.value / devices_of(p)),
      file_write_(p.file_write.value / devices_of(p)),
      file_both_ways_(p.file_both_ways.value / devices_of(p)),
      task_overhead_(p.task_overhead.value),
      step_overhead_(p.step_overhead.value) {}

TaskCost CostModel::copy(double bytes, bool to_device) const {
  const double rate = to_device ? to_device_ : to_host_;
  TaskCost cost;
  // A link may be wider than the memory behind it.
  cost.seconds = latency_ + std::max({bytes / rate, bytes / both_ways_, bytes * copy_dram_ / dram_});
  if (cost.seconds <= 0.0) return cost;
  const double carried = bytes / cost.seconds;
  at(cost.share, to_device ? Resource::to_device : Resource::to_host, carried / rate);
  at(cost.share, Resource::link, carried / both_ways_);
  at(cost.share, Resource::dram, carried * copy_dram_ / dram_);
  at(cost.share, Resource::cores, copy_core_share_ * carried / rate);
  return cost;
}

/// Cost of an exchange of one rank, which gets `bytes` from its peers and gives them as many, across its link and
/// through the host, as where devices have no way of their own to each other.
TaskCost CostModel::between_devices(double bytes) const {
  TaskCost cost;
  cost.seconds = latency_ + std::max({bytes / to_device_, bytes / to_host_, 2.0 * bytes / both_ways_,
                                      2.0 * bytes * copy_dram_ / dram_});
  if (cost.seconds <= 0.0) return cost;
  const double carried = bytes / cost.seconds;
  at(cost.share, Resource::to_device, carried / to_device_);
  at(cost.share, Resource::to_host, carried / to_host_);
  at(cost.share, Resource::link, 2.0 * carried / both_ways_);
  at(cost.share, Resource::dram, 2.0 * carried * copy_dram_ / dram_);
  at(cost.share, Resource::cores, copy_core_share_ * carried / to_device_);
  return cost;
}

TaskCost CostModel::on_device(double seconds, double bytes) const {
  TaskCost cost;
  cost.seconds = launch_ + (device_core_share_ > 0.0 ? std::max(seconds, bytes / dram_) : seconds);
  if (cost.seconds <= 0.0) return cost;
  at(cost.share, Resource::device, 1.0);
  at(cost.share, Resource::cores, device_core_share_);
  if (device_core_share_ > 0.0) at(cost.share, Resource::dram, bytes / cost.seconds / dram_);
  return cost;
}

TaskCost CostModel::on_cpu(double seconds, double dram_bytes, double core_share) const {
  TaskCost cost;
  // Cores that could do more wait for DRAM.
  cost.seconds = task_overhead_ + std::max(seconds, dram_bytes / dram_);
  if (cost.seconds <= 0.0) return cost;
  at(cost.share, Resource::cores, core_share);
  at(cost.share, Resource::dram, dram_bytes / cost.seconds / dram_);
  return cost;
}

/// Cost of writing `bytes` of a save. Copies from state on the device are left out: no disk is as fast as a link.
TaskCost CostModel::to_disk(double bytes) const {
  if (!(disk_ > 0.0)) throw MisuseError("a save is simulated on a machine whose disk is unknown");
  TaskCost cost;
  cost.seconds = std::max(bytes / disk_, bytes * save_bytes / dram_);
  if (cost.seconds <= 0.0) return cost;
  at(cost.share, Resource::cores, disk_core_share_);
  at(cost.share, Resource::dram, bytes * save_bytes / cost.seconds / dram_);
  return cost;
}

/// One way: of both at once the disk carries less than of each alone. Past the cache it is DMA: memory is touched once,
/// and cores wait.
TaskCost CostModel::through_file(double bytes, double rate) const {
  if (!(rate > 0.0)) throw MisuseError("state in a file is simulated on a machine whose file is unknown");
  TaskCost cost;
  cost.seconds = task_overhead_ + std::max({bytes / rate, bytes / file_both_ways_, bytes / dram_});
  if (cost.seconds <= 0.0) return cost;
  at(cost.share, Resource::file, bytes / cost.seconds / file_both_ways_);
  at(cost.share, Resource::dram, bytes / cost.seconds / dram_);
  return cost;
}

TaskCost CostModel::writing(double share) const {
  TaskCost cost = to_disk(disk_);  // a second of it
  for (double& of_resource : cost.share) of_resource *= share;
  return cost;
}

TaskCost CostModel::compute(double seconds) const {
  TaskCost cost;
  cost.seconds = seconds;
  at(cost.share, Resource::device, 1.0);
  at(cost.share, Resource::cores, device_core_share_);
  return cost;
}

TaskCost CostModel::of(const Task& task, bool sums, double pieces) const {
  TaskCost cost =
      of_piece(task, static_cast<double>(task.count()) / pieces, static_cast<double>(task.bytes) / pieces, sums);
  cost.seconds *= pieces;
  return cost;
}

TaskCost CostModel::of_piece(const Task& task, double count, double bytes, bool sums) const {
  switch (task.kind) {
    case TaskKind::fetch_weights:
    case TaskKind::load_state:
    case TaskKind::push_weights:
      return copy(bytes, true);
    case TaskKind::flush_gradient:
    case TaskKind::fetch_norm:
    case TaskKind::store_state:
    case TaskKind::store_weights:
      return copy(bytes, false);
    case TaskKind::gather_weights:
    case TaskKind::all_to_all_gradient:
      return between_devices(bytes);
    case TaskKind::encode_weights:
      return on_cpu(bytes * code_moves / host_stream_, bytes * code_moves, cpu_core_share_);
    case TaskKind::decode_weights:
      return on_device(bytes * code_moves / device_bandwidth_, bytes * code_moves);
    case TaskKind::round_gradient:
      return on_device(count * round_bytes / device_bandwidth_, count * round_bytes);
    case TaskKind::norm_gradient:
      return on_device(count * half_bytes / device_bandwidth_, count * half_bytes);
    case TaskKind::sum_gradient:
    case TaskKind::keep_gradient: {
      const double each = gradient_bytes(task, sums);
      return on_device(count * each / device_bandwidth_, count * each);
    }
    case TaskKind::update_streamed:
    case TaskKind::update_resident:
      return on_device(count / device_update_, count * device_update_bytes_);
    case TaskKind::finish_gradient: {
      const double moved = count * finish_bytes;
      return task.lane == Lane::cpu ? on_cpu(moved / host_stream_, moved, cpu_core_share_)
                                    : on_device(moved / device_bandwidth_, moved);
    }
    case TaskKind::accumulate_gradient: {
      const double moved = static_cast<double>(accumulation_bytes(task)) * count / static_cast<double>(task.count());
      return on_cpu(moved / host_stream_, moved, cpu_core_share_);
    }
    case TaskKind::speculate:
    case TaskKind::retract: {
      // The record is read or written beside.
      const double moved = cpu_update_bytes_ + record_bytes_;
      return on_cpu(count / cpu_update_ * moved / cpu_update_bytes_, count * moved, cpu_core_share_);
    }
    case TaskKind::update_cpu:
      return on_cpu(count / cpu_update_, count * cpu_update_bytes_, cpu_core_share_);
    case TaskKind::read_state:
      return through_file(bytes, file_read_);
    case TaskKind::write_state:
      return through_file(bytes, file_write_);
    case TaskKind::save_state:
      return to_disk(bytes);
    case TaskKind::layer_use:
    case TaskKind::commit:
      break;
  }
  throw MisuseError("the caller's work has no cost of its own", name_of(task.kind));
}

}  // namespace tandem
