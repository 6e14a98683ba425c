#pragma once
// Tasks that a plan is lowered to, with a resource, dependencies and bytes, and no closures. The executor binds them to
// streams and workers, the simulator to durations.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/index.hpp"
#include "core/params/state_array.hpp"
#include "scheduler/plan/indices.hpp"

namespace tandem {

struct Task;
/// Number of a task among all that a lowering has emitted.
using TaskId = Index<Task, std::int64_t>;
constexpr TaskId no_task;

/// The resource a task occupies. `caller` tasks are external: the caller's own work on a layer, begun by
/// fetch or gradients and ended by release or commit. So are `disk` tasks: whoever saves begins and ends them. The
/// lanes of the file are for state that lives there.
/// `peers` is for what devices of a group give each other: all ranks have the same tasks there, and start them in the
/// order in which they are emitted.
enum class Lane : std::uint8_t {
  caller,
  host_to_device,
  device_to_host,
  device,
  cpu,
  disk,
  file_read,
  file_write,
  peers,
};
constexpr int lane_count = 9;
std::string_view name_of(Lane lane) noexcept;
/// Whether its tasks run on a stream of the device.
constexpr bool is_of_device(Lane lane) noexcept {
  return lane == Lane::host_to_device || lane == Lane::device_to_host || lane == Lane::device || lane == Lane::peers;
}

enum class TaskKind : std::uint8_t {
  layer_use,            ///< caller: computes with a layer's weights
  commit,               ///< caller: has filled a layer's gradients
  fetch_weights,        ///< h2d: a layer's weights into a buffer; those that cross in codes, into a buffer for these
  encode_weights,       ///< cpu: codes of a layer's new weights, which cross the link in their place
  decode_weights,       ///< device: weights of a layer that has crossed in codes, into its buffer
  gather_weights,       ///< peers: what other ranks own of a layer's weights, into a buffer or the resident layer
  all_to_all_gradient,  ///< peers: what other ranks have of this one's part of a layer's gradient
  round_gradient,       ///< device: fp32 gradient piece to bf16, into staging; where it is final, its norm blocks
  sum_gradient,         ///< device: gradient piece as bf16, added to the others; last, their sum likewise into staging
  keep_gradient,        ///< device: a subgroup's gradient as bf16 (and accumulator), stays on the device
  flush_gradient,       ///< d2h: staged piece, or one that the caller has written in bf16, to the host
  accumulate_gradient,  ///< cpu: accumulate a piece, and on the last micro-batch its norm blocks
  finish_gradient,  ///< cpu, device: a sum, rounded, and its norm blocks, where no micro-batch was known as the last;
                    ///< as `first_micro` there is no sum, and the gradient becomes zero
  norm_gradient,    ///< device: norm blocks of the part of a subgroup's gradient that leaves as the caller wrote it
  fetch_norm,       ///< d2h: norm blocks that the device has made of a subgroup's gradient
  load_state,       ///< h2d: a piece of state, and of gradient where that lies on the host
  update_streamed,  ///< device: AdamW on a loaded piece
  store_state,      ///< d2h: the updated piece
  update_resident,  ///< device: AdamW on a resident subgroup; on a piece of it where the weights are the host's
  store_weights,    ///< d2h: updated weights of a piece, from staging
  speculate,        ///< cpu: AdamW on a subgroup before the gradient norm is known, with what takes it back
  retract,          ///< cpu: takes that back
  update_cpu,       ///< cpu: AdamW on a subgroup; what speculation has done of it is confirmed, or done again
  push_weights,     ///< h2d: updated weights of a subgroup into the resident layer
  read_state,       ///< file_read: a piece of state into a buffer on the host
  write_state,      ///< file_write: the updated piece, back to its place
  save_state,       ///< disk: reads a range of one array of a parameter's state, for a checkpoint
};
std::string_view name_of(TaskKind kind) noexcept;
/// Whether the task is part of the update: between the norm and the new weights. State on its way back to the host is
/// not, for nobody waits for it before the next update.
constexpr bool is_update(TaskKind kind) noexcept {
  switch (kind) {
    case TaskKind::read_state:
    case TaskKind::load_state:
    case TaskKind::update_streamed:
    case TaskKind::update_resident:
    case TaskKind::store_weights:
    case TaskKind::update_cpu:
    case TaskKind::push_weights:
    case TaskKind::encode_weights:
      return true;
    default:
      return false;
  }
}

struct Task {
  TaskId id = no_task;
  TaskKind kind = TaskKind::layer_use;
  Lane lane = Lane::caller;
  std::int64_t step = 0;  ///< steps begun before this one: tells the updates of two steps apart
  int priority = 0;       ///< lower first among the ready tasks of a lane; then by id
  LayerIndex layer = {};
  SubgroupIndex subgroup = {};
  std::int64_t begin = 0;  ///< elements of the layer's flat arrays
  std::int64_t end = 0;
  int buffer = -1;          ///< weight, gradient or state buffer (index within its kind)
  int staging = -1;         ///< staging piece
  int sum = -1;             ///< buffer for a sum of gradients
  int code_buffer = -1;     ///< buffer for a layer's codes; -1: its weights cross as they are stored
  int file_buffer = -1;     ///< buffer on the host for state that lives in a file
  int receive_buffer = -1;  ///< buffer for what other ranks send; -1 in a piece of this rank's own gradient
  int from_rank = 0;        ///< rank whose gradient a received piece is
  StateArray array = StateArray::master;  ///< array that a save_state reads
  bool first_micro = true;                ///< first of the step's micro-batches, every rank's
  bool last_micro = true;
  bool in_bf16 = false;     ///< gradient piece: the caller writes bf16, nothing is left to round
  bool in_fp32 = false;     ///< gradient piece: the final gradient is fp32, nothing is ever rounded
  std::uint64_t bytes = 0;  ///< across the link, or to or from a file; of codes, where they are made or decoded

  std::int64_t count() const noexcept { return end - begin; }
  /// "flush_gradient h.3 [0, 65536)".
  std::string text(std::string_view layer_name) const;
};

/// Whether the task is of a whole subgroup, not of a piece: on the CPU, and where nothing of it leaves the device;
/// unless its state comes from a file.
bool takes_subgroup_whole(const Task& task) noexcept;

/// Bytes of memory that adding to a sum of gradients moves, a parameter: bf16 read, fp32 read and written.
constexpr int sum_bytes = 10;
/// Bytes of memory that a sum takes a parameter to become the final gradient: fp32 read, bf16 written, read for the
/// norm.
constexpr int finish_bytes = 8;
/// Bytes of memory that a byte of codes takes to be made or decoded: it, and the bf16 that it stands for.
constexpr int code_moves = 3;
/// Bytes of host memory that an `accumulate_gradient` or a `finish_gradient` moves: for the sum, where there are
/// several micro-batches, and for the norm after the last.
std::uint64_t accumulation_bytes(const Task& task) noexcept;

/// Tasks in the order in which they are emitted, each with what it depends on. Cleared and filled again, it
/// allocates nothing: it is as large as it has been.
class TaskList {
 public:
  /// The new last task.
  Task& add(const Task& task) { return tasks_.emplace_back(Emitted{task, dependencies_.size()}); }
  /// Adds dependencies of the last task; `no_task` is none.
  void depends_on(TaskId first) {
    if (first != no_task) dependencies_.push_back(first);
  }
  void depends_on(std::span<const TaskId> first) {
    dependencies_.insert(dependencies_.end(), first.begin(), first.end());
  }
  std::span<const TaskId> dependencies(std::size_t i) const {
    const std::size_t begin = tasks_[i].first_dependency;
    const std::size_t end = i + 1 < size() ? tasks_[i + 1].first_dependency : dependencies_.size();
    return {dependencies_.data() + begin, end - begin};
  }

  std::size_t size() const noexcept { return tasks_.size(); }
  bool empty() const noexcept { return tasks_.empty(); }
  const Task& operator[](std::size_t i) const { return tasks_[i]; }
  const Task& back() const { return tasks_.back(); }
  auto begin() const noexcept { return tasks_.begin(); }
  auto end() const noexcept { return tasks_.end(); }
  void clear() noexcept;

 private:
  /// A task, and where its dependencies begin; they end where the next one's do.
  struct Emitted : Task {
    std::size_t first_dependency = 0;
  };

  std::vector<Emitted> tasks_;
  std::vector<TaskId> dependencies_;
};

}  // namespace tandem
