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
#include "offload/storage/storage.hpp"
#include "scheduler/plan/plan.hpp"
#include "scheduler/tasks/task.hpp"

namespace tandem {

/// Learning rate and hyperparameters of one group of parameters.
struct GroupSettings {
  double lr = 0.0;
  AdamW adamw;
};

/// One parameter's update where it is not like that of the others.
struct ParameterException {
  bool absent = false;              ///< it has no gradient, and stays as it is
  std::int64_t missed_updates = 0;  ///< earlier updates of the state that left it as it was
};

/// Settings of the updates of a step.
struct UpdateSettings {
  std::span<const GroupSettings> groups;           ///< by ParameterOptions::group
  std::span<const ParameterException> exceptions;  ///< by owned parameter, in model order; empty: there are none
  std::int64_t step = 1;                           ///< Adam's t, from 1
  std::uint64_t seed = 0;
  double gradient_scale = 1.0;
};

class TaskRunner {
 public:
  /// All must outlive it. `group`: null where the plan has one rank.
  TaskRunner(Device& device, const ParameterLayout& layout, const Plan& plan, const Storage& storage, Group* group);

  /// Queues a task of a device lane on `stream`. Blocks where it is of the peers' lane, until all ranks have come to
  /// it.
  void issue(const Task& task, StreamView stream);
  /// Runs a task of the CPU lane. Blocks.
  void run(const Task& task);
  /// Settings of the updates of step `step` (`Task::step`); those of the step before may still run.
  void set_update(const UpdateSettings& settings, std::int64_t step);

  EngineCounters counters() const;

 private:
  /// Elements from the beginning of its subgroup to that of the task.
  std::int64_t within_subgroup(const Task& task) const;
  /// A run of state elements with the same hyperparameters.
  struct Segment {
    std::int64_t begin = 0;
    std::int64_t end = 0;
    int coefficients = 0;  ///< index of its class
  };
  /// One parameter's run.
  struct ParameterSegment {
    std::int64_t begin = 0;
    std::int64_t end = 0;    ///< with padding
    std::int64_t count = 0;  ///< without
    std::size_t owned = 0;   ///< index among the owned parameters
    int coefficients = 0;
  };
  /// Coefficients of one step's updates.
  struct StepCoefficients {
    std::vector<AdamCoefficients> of_classes;
    std::vector<AdamCoefficients> of_parameters;  ///< by owned parameter; empty: those of its class
    std::vector<unsigned char> absent;            ///< likewise
  };
  struct CoefficientClass {
    bool decay = true;
    double lr_scale = 1.0;
    int group = 0;
    bool operator==(const CoefficientClass&) const = default;
  };

  void build_segments();
  StateFormat format_of(const Task& task) const;
  std::byte* final_gradient(const Task& task) const;
  AdamPiece piece_of(const Task& task, const StateArrays& state, const std::byte* gradient, std::byte* weights) const;
  StateArrays state_of(const Task& task) const;
  void move_state(const Task& task);
  int coefficient_class(const ParameterOptions& options);
  const StepCoefficients& coefficients_of(const Task& task) const;
  std::int64_t updated_parameters(const Task& task) const;
  template <class Call>
  void for_segments(const Task& task, AdamPiece piece, Call call) const;

  void fetch_weights(const Task& task, StreamView stream);
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
  /// By layer, the bytes that each rank owns.
  struct Parts {
    std::array<std::vector<ByteRange>, 2> weights;
    std::vector<ByteRange> gradient;
  };
  std::vector<Parts> parts_;                               ///< empty where there is one rank
  std::vector<std::vector<Segment>> segments_;             ///< by layer
  std::vector<std::vector<ParameterSegment>> parameters_;  ///< by layer
  std::vector<std::int64_t> first_state_;                  ///< by layer: state elements of the layers before it
  std::vector<CoefficientClass> classes_;
  std::array<StepCoefficients, 2> coefficients_;  ///< coefficients of even and odd steps
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
