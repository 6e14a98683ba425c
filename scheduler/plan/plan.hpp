#pragma once
// The plan: for every layer and every subgroup of optimizer state, where it lives, who updates it, and
// through which buffers. Plain data, made before anything is allocated.
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/memory/memory.hpp"
#include "core/params/parameter_layout.hpp"
#include "scheduler/plan/options.hpp"

namespace tandem {

/// Where a subgroup's state lives between steps. In a file it passes through buffers on the host.
enum class Tier : std::uint8_t { device, host, file };
/// Who updates it. `device` with another tier means streamed: state goes up, is updated, comes back.
enum class Updater : std::uint8_t { cpu, device };

std::string_view name_of(Tier tier) noexcept;
std::string_view name_of(Updater updater) noexcept;
/// "fp32", "split", "bf16-moments".
std::string_view name_of(StateFormat format) noexcept;
/// Bytes that `elements` of state take in an arena: three arrays, each aligned.
std::size_t booked_state_bytes(std::int64_t elements, StateFormat format) noexcept;
/// ... and in a file, or a buffer for a piece of it: whole blocks of the disk.
std::size_t file_state_bytes(std::int64_t elements, StateFormat format) noexcept;

/// A contiguous slice [begin, end) of one layer's state, multiples of layout_quantum.
struct Subgroup {
  int layer = 0;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  Tier tier = Tier::host;
  Updater updater = Updater::cpu;
  bool gradient_on_device = false;  ///< the final bf16 gradient stays on the device (resident: always)
  std::int64_t count() const noexcept { return end - begin; }
  UpdatePath path() const noexcept {
    if (updater == Updater::cpu) return UpdatePath::cpu;
    return tier == Tier::device ? UpdatePath::resident : UpdatePath::streamed;
  }
};

/// Layers of similar size share a ring of buffers, so that a huge embedding does not size the blocks'.
struct SizeClass {
  std::int64_t weight_elements = 0;    ///< of one weight buffer (bf16); the largest layer's
  std::int64_t gradient_elements = 0;  ///< of one layer's gradient
  std::int64_t sum_elements = 0;       ///< ... of what the largest slice of a rank has of it
  std::size_t gradient_bytes = 0;      ///< of one gradient buffer, fp32 and bf16 as the layers' parameters say
  int weight_buffers = 0;              ///< 0 where every layer of the class is resident
  int gradient_buffers = 0;
  int sum_buffers = 0;            ///< fp32, of sum_elements each: where gradients add up before they leave
  std::size_t receive_bytes = 0;  ///< of what all other ranks send of one layer's gradient
  int receive_buffers = 0;        ///< for that; 0 where there are none
};

struct LayerPlacement {
  bool resident = false;  ///< weights stay on the device
  bool host_copy = true;  ///< weights on the host: where not resident, or where the CPU updates some of them
  int size_class = 0;
};

struct Plan {
  Policy policy;  ///< that divides so; automatic where `auto` found a division that is no fixed policy's
  bool chosen_by_auto = false;
  std::string storage_hash;  ///< of the layout that it is of
  Rank rank;                 ///< whose it is: subgroups are of its slices
  std::vector<LayerPlacement> layers;
  std::vector<SizeClass> size_classes;
  std::vector<Subgroup> subgroups;  ///< by layer, then offset: the order of updates
  StateFormat state = StateFormat::fp32;
  std::int64_t subgroup_size = 0;      ///< parameters
  std::int64_t piece_elements = 0;     ///< of a piece: what crosses the link does so in pieces, what stays goes whole
  int staging_pieces = 0;              ///< device buffers for pieces of bf16 gradient on their way out
  int state_buffers = 0;               ///< device buffers for pieces of streamed state
  int file_buffers = 0;                ///< host buffers for pieces of state that live in a file
  int max_micro_batches = 1;           ///< of this rank
  int micro_batches_at_once = 1;       ///< that pass through the layers together, as the options say
  bool owners_make_gradients = false;  ///< of tied parameters, as the options say
  std::size_t offloaded_input_bytes = 0;   ///< that the caller moves, as the options say
  int update_threads = 0;                  ///< that an update on the CPU takes at most; 0: all
  bool updates_in_backward = false;        ///< no update waits for the gradient norm, as the options say
  bool sends_sums = false;                 ///< what leaves the device is not each micro-batch's gradient, but their sum
  std::size_t device_memory = 0;           ///< ceiling it was made for
  std::size_t reserved_device_memory = 0;  ///< the caller's share of it
  std::size_t device_reserved = 0;         ///< the share of context and libraries
  std::size_t page_tables = 0;             ///< the driver's share, for pinned memory of all ranks' plans
  std::size_t reserved_host_memory = 0;    ///< the caller's, beside what the plan takes
  std::size_t spare_device_memory = 0;     ///< bytes that are booked and not used: room for plans that may follow
  std::size_t spare_host_memory = 0;       ///< the same of host memory
  MemoryPlan memory;

  /// Whether the device updates a subgroup's weights in a staging piece, because they live on the host; under
  /// split formats they must then be loaded first.
  bool stages_weights(const Subgroup& s) const {
    return s.updater == Updater::device && !layers[static_cast<std::size_t>(s.layer)].resident;
  }
  bool loads_weights(const Subgroup& s) const { return state != StateFormat::fp32 && stages_weights(s); }

  /// Whether a use of a layer adds to the gradients of `owner`, which it has or borrows parameters of.
  bool adds_to(int owner, int layer) const noexcept { return owner == layer || !owners_make_gradients; }

  /// Gradients of a layer that add up to a step's, at most: those of every rank's micro-batches.
  int gradients_of_step() const noexcept { return max_micro_batches * rank.count; }
  /// What must be the same on all ranks of a group, for they exchange weights and gradients in one order.
  std::string common_text() const;

  /// Parameters (padded) updated per step by each way.
  struct Shares {
    std::int64_t cpu = 0;
    std::int64_t streamed = 0;
    std::int64_t resident = 0;
  };
  Shares shares() const noexcept;
  /// Bytes of state in a file that a step reads there, and writes back.
  std::size_t file_bytes_of_step() const noexcept;
  /// Bytes that a subgroup's state takes in the file, piece by piece.
  std::size_t file_bytes(const Subgroup& subgroup) const noexcept;
  /// Whether some layer's weights live on the host, and whether some gradients go there.
  bool streams_weights() const noexcept;
  bool sends_gradients() const noexcept;
  /// "interleave:4, auto", or "auto" of a division of its own.
  std::string policy_text() const;
  /// The order of a step's micro-batches in a few words: "by layer: weights cross the link twice a step instead of
  /// 2 x 8 times, gradients once instead of 8 times".
  std::string order() const;
  /// The memory table and the notes, for people.
  std::string table() const;
  /// Who updates how much, on how many threads, in which order.
  std::string notes() const;
  /// The rows of the table: `memory`, and what is taken beside it.
  MemoryPlan needs() const;
  /// JSON object with every field but `storage_hash`, which says nothing to whoever has no layout.
  std::string json() const;
  /// The same, but of the subgroups, of which there may be a million, only how many there are and the shares.
  std::string outline_json() const;
};

/// A row for each name, and the total.
std::string table_of(const MemoryPlan& memory);

/// What planning must know of the device and the machine.
struct PlanningFacts {
  std::size_t device_capacity = 0;  ///< bytes
  std::size_t host_available = 0;   ///< bytes, for the plan and the caller's own share; 0: unknown, not checked
  std::size_t device_reserved = 0;  ///< bytes that context and libraries take, under the same ceiling
  std::size_t host_limit = 0;       ///< bytes up to which a ceiling of host memory is believed, where it is above what
                                    ///< is available; 0: it is not
  std::size_t file_room = 0;        ///< bytes that the state's file may take; 0: unknown, not checked
  bool device_is_host = false;      ///< the device's memory is the host's: both come out of what is available there
  std::size_t pinned_per_page_table = 0;  ///< bytes, as DeviceInfo has it; 0: pinned memory takes none of the device's
};

/// Bytes of each rank's device that the driver takes there to map host memory of which every rank pins `pinned` bytes:
/// what is pinned in a process is mapped on all devices that it uses.
std::size_t page_table_bytes(std::size_t pinned, const PlanningFacts& facts, Rank rank) noexcept;

/// Bytes of host memory that a run may take by these options: what is available, or the ceiling of host memory where
/// that is higher, up to the machine's limit. 0 where nobody knows what is available.
std::size_t host_room(const OffloadOptions& options, const PlanningFacts& facts) noexcept;

/// By how many bytes a run of `host` and `device` bytes, the caller's shares included, passes the ceiling of host
/// memory or the room for it; 0 where it fits. Of several ranks each takes as much.
std::size_t over_host_memory(const OffloadOptions& options, const PlanningFacts& facts, std::size_t host,
                             std::size_t device) noexcept;

/// Throws UsageError on options that are out of range or contradict each other, MisuseError where the layout has no
/// layers: what `make_plan` and an engine ask first.
void check_options(const ParameterLayout& layout, const OffloadOptions& options);

/// Throws PlanError, with the table and flags that would fit, when a ceiling is passed, and what
/// `check_options` throws. `auto` asks no performance model here: as much as fits is on the device. Allocates nothing.
Plan make_plan(const ParameterLayout& layout, const OffloadOptions& options, const PlanningFacts& facts);

/// The same plan; none, and no time spent on what would fit, where make_plan throws PlanError.
std::optional<Plan> find_plan(const ParameterLayout& layout, const OffloadOptions& options, const PlanningFacts& facts);

/// Every rank plans as the first, whose slices are the largest, so that all have the same buffers and the same layers
/// on the device; this gives, of such a plan, that of the rank which the options name.
Plan plan_of_rank(const ParameterLayout& layout, const OffloadOptions& options, Plan first);

/// Smallest device_memory (bytes) for which make_plan with these options would succeed, everything that
/// is `auto` in them chosen for size.
std::size_t smallest_device_memory(const ParameterLayout& layout, const OffloadOptions& options);

}  // namespace tandem
