#pragma once
// Costs of work on a machine: the one place of every formula that turns bytes, parameters and FLOPs into seconds. The
// derivations are in docs/performance-model.md.
#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "core/params/parameter_layout.hpp"
#include "scheduler/machine/profile.hpp"
#include "scheduler/plan/plan.hpp"
#include "scheduler/tasks/task.hpp"

namespace tandem {

/// Resources that tasks in flight share. `link` is what both ways together may carry, `file` the same for the state's
/// file.
enum class Resource : std::uint8_t { device, to_device, to_host, link, dram, cores, file };
constexpr int resource_count = 7;
/// Name of a resource in reports of what bounds a step: "compute", "host to device", ..., "CPU".
std::string_view name_of(Resource resource) noexcept;

using ResourceShares = std::array<double, resource_count>;

/// One task alone on the machine: how long it takes, and what share of each resource it holds meanwhile.
struct TaskCost {
  double seconds = 0.0;
  ResourceShares share{};
};

// -- updates ---------------------------------------------------------------------------------------------

/// Placement and format, on which the bytes of an update path depend.
struct PathSetting {
  bool weights_resident = true;  ///< false: weights live on the host
  /// Gradient of a streamed parameter is kept on the device; false: it goes to the host and comes back.
  bool gradient_on_device = true;
  double cpu_kernel_bytes = 28.0;  ///< DRAM bytes of the CPU's kernel in this format
  StateFormat state = StateFormat::fp32;
};

/// Bytes for each parameter and step, from when the gradient is complete to when the new weight is in its place: the
/// table "Bytes of an update" of docs/performance-model.md.
struct PathBytes {
  double dram = 0.0;
  double to_device = 0.0;
  double to_host = 0.0;
};
PathBytes path_bytes(UpdatePath path, const PathSetting& setting) noexcept;

/// The profile, whose updates are of fp32 state, for another format: its updates move as many bytes a second.
MachineProfile in_format(MachineProfile profile, StateFormat state);

/// Seconds to update `parameters` that live on the host, share `cpu_share` of them on the CPU and the rest
/// streamed, where the busiest resource alone counts: T(c) = max over resources of a linear function of c.
/// `profile` in the setting's format (`in_format`).
double update_seconds(const MachineProfile& profile, const PathSetting& setting, double parameters, double cpu_share);
/// The cpu_share in [0, 1] that minimises it.
double best_cpu_share(const MachineProfile& profile, const PathSetting& setting);

/// The published stride model, which has no shared DRAM: every k-th subgroup through the device is best for
/// k = 1 + (3/b + 1/Ug) / (1/Uc + 1/Dc - 1/(2b)). Rates in parameters a second; `link` in fp32 values a
/// second one way; `downscale` the CPU's rate of casting weights. Infinite where the CPU keeps pace.
double published_stride(double link, double device_update, double cpu_update, double downscale) noexcept;

// -- forward and backward ------------------------------------------------------------------------------------

/// Arithmetic of one pass through one layer, for one micro-batch.
struct PassWork {
  double matmul_flops = 0.0;
  double fp8_flops = 0.0;  ///< FLOP of products of eight-bit factors, which matmul_flops leaves out
  double attention_flops = 0.0;
  double memory_bytes = 0.0;  ///< bytes that memory-bound kernels move
  double kernels = 0.0;       ///< kernels launched
};
struct LayerWork {
  PassWork forward;
  PassWork backward;  ///< recomputation included
};

/// A machine's figure that bounds work on the device.
enum class WorkBound : std::uint8_t { matmul, attention, device_memory, launches };
/// "matrix products", "attention", "device memory", "launches".
std::string_view name_of(WorkBound bound) noexcept;
/// Seconds of work by what bounds it, at the profile's rates. They do not overlap: the layer takes their sum.
struct BoundSeconds {
  std::array<double, 4> seconds{};  ///< by WorkBound
  double total() const noexcept { return seconds[0] + seconds[1] + seconds[2] + seconds[3]; }
  /// The bound that takes longest.
  WorkBound widest() const noexcept;
  double widest_seconds() const noexcept { return seconds[static_cast<std::size_t>(widest())]; }
};
/// Products of eight-bit factors take the rate of bf16's where the profile does not know theirs.
BoundSeconds bound_seconds(const MachineProfile& profile, const PassWork& work) noexcept;

/// Seconds of a layer for one micro-batch, with nothing else on the device.
struct LayerSeconds {
  double forward = 0.0;
  double backward = 0.0;
};

/// Work estimated without the model: each layer is nothing but matrix products of `tokens`, those of a micro-batch,
/// with every weight of two dimensions or more. For a table that is only looked up this is too much.
std::vector<LayerWork> matrix_work(const ParameterLayout& layout, double tokens, bool recompute = false);
std::vector<LayerSeconds> compute_seconds(const MachineProfile& profile, std::span<const LayerWork> work);
/// Seconds of computing on the device in a step of so many micro-batches: no step is shorter.
double seconds_of_step(std::span<const LayerSeconds> compute, std::int64_t micro_batches) noexcept;

// -- tasks -----------------------------------------------------------------------------------------------

/// Costs of tasks on one machine. Identical devices that share a host and start together each see an equal
/// part of what is shared, at all times: so one device is modelled, with its part of DRAM and cores.
class CostModel {
 public:
  /// `update_threads`: Plan::update_threads (0: all).
  CostModel(const MachineProfile& profile, StateFormat state, int update_threads = 0);

  /// Cost of a task of any lane but the caller's. `sums`: several gradients of a layer add up in a step. `pieces`: the
  /// task counts as so many equal tasks, one after another.
  TaskCost of(const Task& task, bool sums, double pieces = 1.0) const;
  /// Cost of the caller's work that takes `seconds` alone.
  TaskCost compute(double seconds) const;
  /// Cost of copying bytes across the link.
  TaskCost copy(double bytes, bool to_device) const;
  /// Cost of a disk that writes for this share of the time, for as long as it takes.
  TaskCost writing(double share) const;
  /// Seconds to write `bytes` of zeros on the device.
  double zero_seconds(double bytes) const { return bytes / device_bandwidth_; }
  double step_overhead() const { return step_overhead_; }
  /// Share of the host's cores that the device's kernels take, where the device is made of them.
  double device_core_share() const { return device_core_share_; }

 private:
  explicit CostModel(const MachineProfile& in_format);
  TaskCost between_devices(double bytes) const;
  TaskCost on_device(double seconds, double bytes) const;
  TaskCost on_cpu(double seconds, double dram_bytes, double core_share) const;
  TaskCost to_disk(double bytes) const;
  TaskCost through_file(double bytes, double rate) const;
  TaskCost of_piece(const Task& task, double count, double bytes, bool sums) const;

  double device_bandwidth_;
  double device_update_;
  double device_update_bytes_ = 0.0;
  double record_bytes_ = 0.0;  ///< for each parameter, of an update that may be taken back
  double launch_;
  double device_core_share_;
  double to_device_;
  double to_host_;
  double both_ways_;
  double latency_;
  double copy_dram_;
  double copy_core_share_;
  double dram_;
  double host_stream_;
  double cpu_update_;
  double cpu_core_share_;
  double cpu_update_bytes_;
  double disk_;
  double disk_core_share_;
  double file_read_;
  double file_write_;
  double file_both_ways_;
  double task_overhead_;
  double step_overhead_;
};

}  // namespace tandem
