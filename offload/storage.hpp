#pragma once
// All memory of an engine: booked once, carved as the plan says, never grown.
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/device.hpp"
#include "core/memory.hpp"
#include "core/numerics/adam_state.hpp"
#include "core/parameter_layout.hpp"
#include "scheduler/plan.hpp"

namespace tandem {

/// Where one subgroup's arrays lie; null where the plan has none. `norm`: one fp64 per layout_quantum.
struct SubgroupMemory {
  StateArrays state;         ///< on the subgroup's tier
  bf16* gradient = nullptr;  ///< final gradient: on the device where gradient_on_device, else on the host
  float* sum = nullptr;      ///< accumulator beside it
  double* device_norm = nullptr;
  double* host_norm = nullptr;
};

struct StateBuffer {
  StateArrays state;
  bf16* gradient = nullptr;  ///< where gradients of streamed subgroups come from the host
};

class Storage {
 public:
  /// Allocates and zeroes everything. Blocks. Throws PlanError, DeviceError; MisuseError where the
  /// carving and the plan's total differ.
  Storage(Device& device, const ParameterLayout& layout, const Plan& plan);

  bf16* resident_weights(int layer) const { return resident_weights_[static_cast<std::size_t>(layer)]; }
  bf16* host_weights(int layer) const { return host_weights_[static_cast<std::size_t>(layer)]; }
  bf16* weight_buffer(int i) const { return weight_buffers_[static_cast<std::size_t>(i)]; }
  float* gradient_buffer(int i) const { return gradient_buffers_[static_cast<std::size_t>(i)]; }
  bf16* staging(int i) const { return staging_[static_cast<std::size_t>(i)]; }
  const StateBuffer& state_buffer(int i) const { return state_buffers_[static_cast<std::size_t>(i)]; }
  const SubgroupMemory& subgroup(int i) const { return subgroups_[static_cast<std::size_t>(i)]; }

  std::size_t device_bytes() const noexcept { return device_block_.bytes(); }
  std::size_t host_bytes() const noexcept { return host_block_.bytes(); }

 private:
  void carve_device(const ParameterLayout& layout, const Plan& plan);
  void carve_host(const ParameterLayout& layout, const Plan& plan);

  MemoryBlock device_block_;
  MemoryBlock host_block_;
  std::vector<bf16*> resident_weights_;
  std::vector<bf16*> host_weights_;
  std::vector<bf16*> weight_buffers_;
  std::vector<float*> gradient_buffers_;
  std::vector<bf16*> staging_;
  std::vector<StateBuffer> state_buffers_;
  std::vector<SubgroupMemory> subgroups_;
};

}  // namespace tandem
