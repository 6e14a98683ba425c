#pragma once
// All memory of an engine: booked once, carved as the plan says, never grown.
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <vector>

#include "core/base/index.hpp"
#include "core/device/device.hpp"
#include "core/memory/memory.hpp"
#include "core/numerics/adam_state.hpp"
#include "core/params/parameter_layout.hpp"
#include "core/params/state_array.hpp"
#include "offload/storage/state_file.hpp"
#include "scheduler/plan/indices.hpp"
#include "scheduler/plan/plan.hpp"
#include "scheduler/plan/rank_slice.hpp"

namespace tandem {

/// Addresses of one subgroup's arrays; null where the plan has none. `norm`: one fp64 per layout_quantum.
struct SubgroupMemory {
  StateArrays state;  ///< on the subgroup's tier; null where that is a file
  StateFormat format = StateFormat::fp32;
  std::int64_t piece_elements = 0;  ///< elements of a piece of it
  /// Final gradient, bf16 or of fp32_weights float: on the device where gradient_on_device, else on the host.
  std::byte* gradient = nullptr;
  float* sum = nullptr;                   ///< accumulator beside it
  std::byte* host_weights = nullptr;      ///< weights of its elements in host memory; null where the host has none
  std::byte* resident_weights = nullptr;  ///< weights on the device, of a layer that stays there; else null
  std::byte* undo = nullptr;              ///< record that takes an update back; null where it has none
  double* device_norm = nullptr;
  double* host_norm = nullptr;
  std::uint64_t file_place = 0;  ///< position in the file at which its state begins
  std::int64_t file_count = 0;   ///< elements of it there
};

/// Memory for a piece of state that the device updates, in any format.
struct StateBuffer {
  std::byte* state = nullptr;
  std::byte* gradient = nullptr;  ///< gradients of streamed subgroups, which come from the host
};

/// Addresses of everything of a plan in the two blocks.
struct Carving {
  using OfLayers = IndexedVector<LayerIndex, std::byte*>;
  OfLayers resident_weights;  ///< as Layer::weight_offset says; null where not resident
  OfLayers host_weights;      ///< weights of the rank's slice; null where the host has none
  OfLayers layer_codes;       ///< on the host; null where weights cross as they are stored
  std::vector<std::byte*> weight_buffers;
  std::vector<std::byte*> fetched_codes;     ///< buffers on the device
  std::byte* decoded = nullptr;              ///< bf16 values of one layer's coded weights; null where none are coded
  std::vector<std::byte*> gradient_buffers;  ///< gradients of one layer at a time, as Layer::gradient_offset says
  std::vector<std::byte*> receive_buffers;   ///< parts of a gradient that other ranks send, one after another
  std::vector<float*> sum_buffers;
  std::vector<double*> gradient_norms;  ///< norm blocks of each gradient buffer, where the device makes those
  std::vector<std::byte*> staging;
  std::vector<StateBuffer> state_buffers;
  std::vector<std::byte*> file_buffers;  ///< whole blocks of the disk
  IndexedVector<SubgroupIndex, SubgroupMemory> subgroups;
};

class Storage {
 public:
  /// Allocates and zeroes everything; what the plan has in a file, in `folder`. Blocks. Throws PlanError, DeviceError,
  /// WriteError; MisuseError where the carving and the plan's total differ. The layout must outlive it. What takes
  /// longer than `watchdog_seconds`, here and in `carve_anew`, is told as a stall, and waited for.
  Storage(Device& device, const ParameterLayout& layout, const Plan& plan, const std::filesystem::path& folder,
          double watchdog_seconds);

  /// Throws PlanError where the blocks are too small for another plan, what that has spare not counted.
  void require_room_for(const Plan& plan) const;
  /// Carves the same blocks as another plan of the same layout and state format says, which must fit, and moves state
  /// and weights to where it has them, bit for bit; all else is undefined. Neither has state in a file. While no task
  /// is in flight. Takes 4 MiB of host memory beside the blocks. Blocks. Throws DeviceError, after which the contents
  /// are lost.
  void carve_anew(Device& device, const ParameterLayout& layout, const Plan& from, const Plan& to);

  std::byte* resident_weights(LayerIndex layer) const { return carving_.resident_weights[layer]; }
  /// Resident weight of an element.
  std::byte* resident_weight(LayerIndex layer, std::int64_t element) const {
    return resident_weights(layer) + layer_at(layout_, layer).weight_offset(element);
  }
  bool has_host_weights(LayerIndex layer) const { return carving_.host_weights[layer] != nullptr; }
  /// Host weight of an element that the rank owns.
  std::byte* host_weight(LayerIndex layer, std::int64_t element) const {
    return carving_.host_weights[layer] + weight_place(layer_at(layout_, layer), slices_[layer], element);
  }
  std::byte* weight_buffer(int i) const { return carving_.weight_buffers[static_cast<std::size_t>(i)]; }
  /// Codes and scales of a layer's fp8_factors on the host, and in buffer i on the device, as link_codes.hpp has them.
  std::byte* layer_codes(LayerIndex layer) const { return carving_.layer_codes[layer]; }
  std::byte* fetched_codes(int i) const { return carving_.fetched_codes[static_cast<std::size_t>(i)]; }
  std::byte* decoded() const noexcept { return carving_.decoded; }
  std::byte* gradient_buffer(int i) const { return carving_.gradient_buffers[static_cast<std::size_t>(i)]; }
  std::byte* receive_buffer(int i) const { return carving_.receive_buffers[static_cast<std::size_t>(i)]; }
  /// Slice of a layer that the rank owns.
  const LayerSlice& slice(LayerIndex layer) const { return slices_[layer]; }
  /// Sum buffer i, for the rank's slice.
  float* sum_buffer(int i) const { return carving_.sum_buffers[static_cast<std::size_t>(i)]; }
  /// Norm blocks of gradient buffer i, for the whole layer.
  double* gradient_norm(int i) const { return carving_.gradient_norms[static_cast<std::size_t>(i)]; }
  std::byte* staging(int i) const { return carving_.staging[static_cast<std::size_t>(i)]; }
  /// The arrays of a piece of a subgroup, of `count` elements, in a buffer of the device, or in one for state that
  /// lives in the file.
  StateArrays state_buffer(int i, SubgroupIndex subgroup, std::int64_t count) const;
  StateArrays file_buffer(int i, SubgroupIndex subgroup, std::int64_t count) const;
  /// Gradient beside state in a buffer of the device.
  std::byte* streamed_gradient(int i) const { return carving_.state_buffers[static_cast<std::size_t>(i)].gradient; }
  /// A piece of a subgroup from its element `at` on, with which a piece of the plan begins: between file and buffer.
  void read_file(SubgroupIndex subgroup, std::int64_t at, std::int64_t count, int buffer) const;
  void write_file(SubgroupIndex subgroup, std::int64_t at, std::int64_t count, int buffer) const;
  /// Stored bytes of one array of a subgroup in the file, from element `at` on.
  void read_file(SubgroupIndex subgroup, StateArray array, std::int64_t at, std::span<std::byte> bytes) const;
  void write_file(SubgroupIndex subgroup, StateArray array, std::int64_t at, std::span<const std::byte> bytes) const;

  const SubgroupMemory& subgroup(SubgroupIndex index) const { return carving_.subgroups[index]; }

  std::size_t device_bytes() const noexcept { return device_block_.bytes(); }
  std::size_t host_bytes() const noexcept { return host_block_.bytes(); }
  /// Bytes at the end of the host's block that the system refused to pin.
  std::size_t pageable_bytes() const noexcept { return pageable_bytes_; }

 private:
  Carving carve(const ParameterLayout& layout, const Plan& plan) const;
  std::uint64_t place_in_file(SubgroupIndex subgroup, std::int64_t at) const;
  template <class Byte, class Move>
  void for_file_ranges(SubgroupIndex subgroup, StateArray array, std::int64_t at, std::span<Byte> bytes,
                       const Move& move) const;

  const ParameterLayout& layout_;
  MemoryBlock device_block_;
  MemoryBlock host_block_;
  std::size_t pageable_bytes_ = 0;
  IndexedVector<LayerIndex, LayerSlice> slices_;
  Carving carving_;
  double watchdog_seconds_;
  std::unique_ptr<StateFile> file_;  ///< null where all state is in memory; with it, there is no other plan
};

}  // namespace tandem
