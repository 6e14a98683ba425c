#pragma once
// Execution of tasks: one function from a task to calls of the device or of the CPU's kernels, and the counters of the
// work that was really executed.
#include <array>
#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "core/device/device.hpp"
#include "core/device/group.hpp"
#include "core/ops/update_kernels.hpp"
#include "core/params/parameter_layout.hpp"
#include "offload/execution/engine_counters.hpp"
#include "offload/execution/speculation.hpp"
#include "offload/execution/update_coefficients.hpp"
#include "offload/storage/storage.hpp"
#include "scheduler/plan/plan.hpp"
#include "scheduler/tasks/task.hpp"

namespace tandem {

class TaskRunner {
 public:
  /// All arguments must outlive the object. `group`: null where the plan has one rank.
  TaskRunner(Device& device, const ParameterLayout& layout, const Plan& plan, const Storage& storage, Group* group);

  /// Queues a task of a device lane on `stream`. Blocks where it is of the peers' lane, until all ranks have come to
  /// it.
  void issue(const Task& task, StreamView stream);
  /// Runs a task of the CPU lane. Blocks.
  void run(const Task& task);
  /// Settings of the updates of step `step` (`Task::step`); those of the step before may still run.
  void set_update(const UpdateSettings& settings, std::int64_t step) { coefficients_.set(settings, step); }

  Speculation& speculation() noexcept { return speculation_; }

  EngineCounters counters() const;

 private:
  /// Elements from the beginning of its subgroup to that of the task.
  std::int64_t within_subgroup(const Task& task) const { return task.begin - subgroup_at(plan_, task.subgroup).begin; }
  StateFormat format_of(const Task& task) const { return storage_.subgroup(task.subgroup).format; }
  /// Final gradient of a task's elements.
  std::byte* final_gradient(const Task& task) const {
    const SubgroupMemory& memory = storage_.subgroup(task.subgroup);
    return memory.gradient + gradient_bytes(memory.format, within_subgroup(task));
  }
  /// Weights of a task's elements in host memory, and on the device where their layer stays there.
  std::byte* host_weights(const Task& task) const {
    const SubgroupMemory& memory = storage_.subgroup(task.subgroup);
    return memory.host_weights + weight_bytes(memory.format, within_subgroup(task));
  }
  std::byte* resident_weights(const Task& task) const {
    const SubgroupMemory& memory = storage_.subgroup(task.subgroup);
    return memory.resident_weights + weight_bytes(memory.format, within_subgroup(task));
  }
  AdamPiece piece_on_cpu(const Task& task) const;
  AdamPiece piece_of(const Task& task, const StateArrays& state, const std::byte* gradient, std::byte* weights) const;
  StateArrays state_of(const Task& task) const;
  void move_state(const Task& task);

  void fetch_weights(const Task& task, StreamView stream);
  void encode_weights(const Task& task);
  void decode_weights(const Task& task, StreamView stream);
  void gather_weights(const Task& task, StreamView stream);
  void all_to_all_gradient(const Task& task, StreamView stream);
  const void* caller_gradient(const Task& task) const;
  void add_gradient(const Task& task, float* sum, std::byte* result, StreamView stream);
  void round_gradient(const Task& task, StreamView stream);
  void sum_gradient(const Task& task, StreamView stream);
  void norm_of(const void* gradient, const Task& task, StreamView stream);
  void norm_blocks(const void* gradient, const Task& task, double* partial, StreamView stream);
  void finish_sum(const Task& task, const float* sum, std::byte* gradient, StreamView stream);
  void keep_gradient(const Task& task, StreamView stream);
  void flush_gradient(const Task& task, StreamView stream);
  void fetch_norm(const Task& task, StreamView stream);
  void load_state(const Task& task, StreamView stream);
  void store_state(const Task& task, StreamView stream);
  void store_weights(const Task& task, StreamView stream);
  void push_weights(const Task& task, StreamView stream);
  void update_on_device(const Task& task, StreamView stream);
  void accumulate_gradient(const Task& task);
  void finish_on_cpu(const Task& task);
  void finish_sum_on_cpu(const Task& task);
  void norm_blocks_on_cpu(const Task& task);
  void finish_on_device(const Task& task, StreamView stream);
  void update_on_cpu(const Task& task);
  std::byte* updated_weights(const Task& task) const;
  void to_device(void* to, const void* from, std::size_t bytes, StreamView stream);
  void to_host(void* to, const void* from, std::size_t bytes, StreamView stream);

  Device& device_;
  const ParameterLayout& layout_;
  const Plan& plan_;
  const Storage& storage_;
  Group* group_;
  /// Bytes of a layer that each rank owns.
  struct Parts {
    std::array<std::vector<ByteRange>, 2> weights;
    std::vector<ByteRange> gradient;
  };
  IndexedVector<LayerIndex, Parts> parts_;  ///< empty where there is one rank
  UpdateCoefficients coefficients_;
  Speculation speculation_;
  IndexedVector<LayerIndex, std::int64_t> first_state_;  ///< state elements of the layers before each
  std::atomic<std::uint64_t> bytes_to_device_{0};
  std::atomic<std::uint64_t> bytes_to_host_{0};
  std::atomic<std::uint64_t> bytes_from_peers_{0};
  std::atomic<std::uint64_t> dram_bytes_{0};
  std::atomic<std::uint64_t> bytes_from_file_{0};
  std::atomic<std::uint64_t> bytes_to_file_{0};
  std::atomic<std::uint64_t> updated_cpu_{0};
  std::atomic<std::uint64_t> updated_streamed_{0};
  std::atomic<std::uint64_t> updated_resident_{0};
};

}  // namespace tandem
