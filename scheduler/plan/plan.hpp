#pragma once
// The plan: for every layer and every subgroup of optimizer state, where it lives, who updates it, and
// through which buffers. Plain data, made before anything is allocated.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/memory/memory.hpp"
#include "core/params/parameter_layout.hpp"
#include "core/tensor/layout_quantum.hpp"
#include "scheduler/plan/options.hpp"

namespace tandem {

/// Place of a subgroup's state between steps. In a file, state passes through buffers on the host.
enum class Tier : std::uint8_t { device, host, file };
/// Processor that updates a subgroup. `device` with another tier means streamed: state goes up, is updated, comes back.
enum class Updater : std::uint8_t { cpu, device };

std::string_view name_of(Tier tier) noexcept;
std::string_view name_of(Updater updater) noexcept;
/// "off", "auto", "on".
std::string_view name_of(Speculate speculate) noexcept;
/// "fp32", "split", "bf16-moments", "lion".
std::string_view name_of(StateFormat format) noexcept;
/// Bytes that `elements` of state take in an arena: three arrays, each aligned.
std::size_t booked_state_bytes(std::int64_t elements, StateFormat format) noexcept;
/// Bytes that `elements` of state take in a file, or in a buffer for a piece of it: whole blocks of the disk.
std::size_t file_state_bytes(std::int64_t elements, StateFormat format) noexcept;

/// A contiguous slice [begin, end) of one layer's state, multiples of layout_quantum.
struct Subgroup {
  int layer = 0;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  Tier tier = Tier::host;
  Updater updater = Updater::cpu;
  bool gradient_on_device = false;  ///< the final gradient stays on the device (resident: always)
  bool fp32_weights = false;        ///< its weights and gradients are fp32
  bool speculates = false;          ///< it has memory for what takes an update of it back
  std::int64_t count() const noexcept { return end - begin; }
  UpdatePath path() const noexcept {
    if (updater == Updater::cpu) return UpdatePath::cpu;
    return tier == Tier::device ? UpdatePath::resident : UpdatePath::streamed;
  }
};

/// Layers of similar size share a ring of buffers, so that a huge embedding does not size the blocks'.
struct SizeClass {
  std::int64_t weight_elements = 0;    ///< elements of one weight buffer; the largest layer's
  std::size_t weight_bytes = 0;        ///< bytes of one weight buffer
  std::int64_t gradient_elements = 0;  ///< elements of one layer's gradient
  std::int64_t sum_elements = 0;       ///< elements that the largest slice of a rank has of that gradient
  std::size_t gradient_bytes = 0;      ///< bytes of one gradient buffer, fp32 and bf16 as the layers' parameters say
  int weight_buffers = 0;              ///< 0 where every layer of the class is resident
  int gradient_buffers = 0;
  int sum_buffers = 0;            ///< buffers for fp32 sums of gradients, of sum_elements each
  std::size_t receive_bytes = 0;  ///< bytes that all other ranks send of one layer's gradient
  int receive_buffers = 0;        ///< buffers of receive_bytes; 0 for a single rank
};

struct LayerPlacement {
  bool resident = false;  ///< weights stay on the device
  bool host_copy = true;  ///< weights on the host: where not resident, or where the CPU updates some of them
  bool in_codes = false;  ///< its fp8_factors cross the link in a byte an element
  int size_class = 0;
};

struct Plan {
  Policy policy;  ///< policy of this division; automatic where `auto` found a division that is no fixed policy's
  bool chosen_by_auto = false;
  std::string storage_hash;  ///< storage hash of its layout
  Rank rank;                 ///< rank that it is for: subgroups are of its slices
  std::vector<LayerPlacement> layers;
  std::vector<SizeClass> size_classes;
  std::vector<Subgroup> subgroups;  ///< by layer, then offset: the order of updates
  StateFormat state = StateFormat::fp32;
  std::int64_t subgroup_size = 0;  ///< parameters
  /// Elements of a piece: copies across the link go in pieces, work that stays on the device goes whole.
  std::int64_t piece_elements = 0;
  int staging_pieces = 0;         ///< device buffers for pieces of gradient on their way out
  int state_buffers = 0;          ///< device buffers for pieces of streamed state
  int file_buffers = 0;           ///< host buffers for pieces of state that live in a file
  int code_buffers = 0;           ///< device buffers for codes of a layer's weights, until they are decoded
  int max_micro_batches = 1;      ///< micro-batches per step of this rank
  int micro_batches_at_once = 1;  ///< micro-batches that pass through the layers together, as the options say
  /// Whether gradients of tied parameters come with their owner's, as the options say.
  bool owners_make_gradients = false;
  std::size_t offloaded_input_bytes = 0;  ///< bytes of a layer's input that the caller moves, as the options say
  int update_threads = 0;                 ///< threads that an update on the CPU takes at most; 0: all
  Speculate speculate = Speculate::off;   ///< OffloadOptions::speculate
  bool updates_in_backward = false;       ///< no update waits for the gradient norm, as the options say
  bool sends_sums = false;        ///< whether sums of gradients leave the device, not each micro-batch's gradient
  std::size_t device_memory = 0;  ///< bytes, the ceiling that the plan was made for
  std::size_t reserved_device_memory = 0;  ///< bytes of device_memory for the caller's own use
  std::size_t device_reserved = 0;         ///< bytes of device_memory that context and libraries take
  std::size_t page_tables = 0;  ///< bytes of device_memory that the driver takes for pinned memory of all ranks' plans
  std::size_t reserved_host_memory = 0;  ///< bytes of host memory for the caller's own use, beside the plan's
  std::size_t spare_device_memory = 0;   ///< bytes booked on the device and not used: room for plans that may follow
  std::size_t spare_host_memory = 0;     ///< bytes booked on the host and not used
  MemoryPlan memory;

  /// Whether the device updates a subgroup's weights in a staging piece, because they live on the host; under
  /// split formats they must then be loaded first.
  bool stages_weights(const Subgroup& s) const {
    return s.updater == Updater::device && !layers[static_cast<std::size_t>(s.layer)].resident;
  }
  bool loads_weights(const Subgroup& s) const { return reads_weights(format_of(s)) && stages_weights(s); }
  /// How a subgroup's state is stored.
  StateFormat format_of(const Subgroup& s) const noexcept { return s.fp32_weights ? with_fp32_weights(state) : state; }
  /// Elements of a piece of it: of fp32 weights so many that they fit in any buffer for a piece of the others.
  std::int64_t piece_of(const Subgroup& s) const noexcept {
    return s.fp32_weights ? std::max(layout_quantum, piece_elements / 4 / layout_quantum * layout_quantum)
                          : piece_elements;
  }

  /// Whether a use of `layer` adds to the gradients of `owner`, the layer itself or one that it borrows parameters of.
  bool adds_to(int owner, int layer) const noexcept { return owner == layer || !owners_make_gradients; }

  /// Gradients of a layer that add up to a step's, at most: those of every rank's micro-batches.
  int gradients_of_step() const noexcept { return max_micro_batches * rank.count; }
  /// Whether gradients leave the device as they are final, so that the device makes their norm: the host would have to
  /// read all of them once more, while it updates or the caller waits.
  bool norms_on_device() const noexcept { return sends_sums || gradients_of_step() == 1; }
  /// Text of the fields that must be equal on all ranks of a group, since they exchange weights and gradients in one
  /// order.
  std::string common_text() const;

  /// Parameters (padded) updated per step on each path.
  struct Shares {
    std::int64_t cpu = 0;
    std::int64_t streamed = 0;
    std::int64_t resident = 0;
  };
  Shares shares() const noexcept;
  /// Parameters (padded) whose update may run before the gradient norm is known.
  std::int64_t speculating_parameters() const noexcept;
  bool speculates() const noexcept { return speculating_parameters() > 0; }
  /// Whether a step is predicted as one whose updates ran ahead of the norm and stayed: where that was asked for. With
  /// `auto` it is up to the norms, and a step is predicted as one that waits, which takes longer.
  bool counts_on_speculation() const noexcept { return speculate == Speculate::on && speculates(); }
  /// Bytes of state in a file that a step reads there, and writes back.
  std::size_t file_bytes_of_step() const noexcept;
  /// Bytes that a subgroup's state takes in the file, piece by piece.
  std::size_t file_bytes(const Subgroup& subgroup) const noexcept;
  /// Whether some layer's weights live on the host; whether some gradients go there.
  bool streams_weights() const noexcept;
  bool sends_gradients() const noexcept;
  /// The policy as text: "interleave:4, auto", or "auto" for a division of its own.
  std::string policy_text() const;
  /// The order of a step's micro-batches in a few words: "by layer: weights cross the link twice a step instead of
  /// 2 x 8 times, gradients once instead of 8 times".
  std::string order() const;
  /// The memory table and the notes, for people.
  std::string table() const;
  /// Notes below the table: who updates how much, on how many threads, in which order.
  std::string notes() const;
  /// Rows of the table: `memory`, and the memory taken beside it.
  MemoryPlan needs() const;
  /// JSON object with every field but `storage_hash`, which has no meaning without the layout.
  std::string json() const;
  /// JSON object like json(), but with the number of subgroups and their shares instead of every subgroup, of which
  /// there may be a million.
  std::string outline_json() const;
};

/// Memory table as text: a row for each name, and the total.
std::string table_of(const MemoryPlan& memory);

/// Facts about the device and the machine that planning needs.
struct PlanningFacts {
  std::size_t device_capacity = 0;  ///< bytes
  std::size_t host_available = 0;   ///< bytes, for the plan and the caller's own share; 0: unknown, not checked
  std::size_t device_reserved = 0;  ///< bytes that context and libraries take, under the same ceiling
  /// Bytes of host memory that a ceiling may reach, where it is above host_available; 0: none above it.
  std::size_t host_limit = 0;
  std::size_t file_room = 0;    ///< bytes that the state's file may take; 0: unknown, not checked
  bool device_is_host = false;  ///< the device's memory is the host's: both come out of what is available there
  std::size_t pinned_per_page_table = 0;  ///< bytes, as DeviceInfo has it; 0: pinned memory takes none of the device's
};

/// Bytes of each rank's device that the driver takes to map pinned host memory, where every rank pins `pinned` bytes:
/// memory pinned in a process is mapped on all devices that it uses.
std::size_t page_table_bytes(std::size_t pinned, const PlanningFacts& facts, Rank rank) noexcept;

/// Bytes of host memory that a run with these options may take: the available memory, or the ceiling of host memory
/// where that is higher, up to the machine's limit. 0 where the available memory is unknown.
std::size_t host_room(const OffloadOptions& options, const PlanningFacts& facts) noexcept;

/// Bytes by which a run of `host` and `device` bytes, the caller's shares included, passes the ceiling of host memory
/// or the room for it; 0 where it fits. Each of several ranks takes as much.
std::size_t over_host_memory(const OffloadOptions& options, const PlanningFacts& facts, std::size_t host,
                             std::size_t device) noexcept;

/// Whether the options keep the weights of some layers off the device.
bool keeps_fewer_layers(const ParameterLayout& layout, const OffloadOptions& options) noexcept;

/// Throws UsageError on hyperparameters out of range: betas are at least 0 and below 1, eps is above 0, weight decay at
/// least 0, both finite in fp32.
void check_adamw(const AdamW& adamw);

/// Checks options before `make_plan` or an engine uses them. Throws UsageError on options that are out of range or
/// contradict each other, MisuseError where the layout has no layers.
void check_options(const ParameterLayout& layout, const OffloadOptions& options);

/// The plan for these options. Throws PlanError, with the table and flags that would fit, when a ceiling is passed, and
/// as `check_options`. `auto` uses no performance model here: as much as fits is on the device. Allocates nothing.
Plan make_plan(const ParameterLayout& layout, const OffloadOptions& options, const PlanningFacts& facts);

/// make_plan() as a question: no plan where that throws PlanError, and no time spent on what would fit.
std::optional<Plan> find_plan(const ParameterLayout& layout, const OffloadOptions& options, const PlanningFacts& facts);

/// The plan of the rank that the options name, from the plan of the first. Every rank plans as the first, whose slices
/// are the largest, so that all have the same buffers and the same layers on the device.
Plan plan_of_rank(const ParameterLayout& layout, const OffloadOptions& options, Plan first);

/// Smallest device_memory (bytes) for which make_plan with these options would succeed, every `auto` in them chosen for
/// size.
std::size_t smallest_device_memory(const ParameterLayout& layout, const OffloadOptions& options);

}  // namespace tandem
