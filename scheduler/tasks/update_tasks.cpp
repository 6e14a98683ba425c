#include "scheduler/tasks/update_tasks.hpp"

namespace tandem {
namespace {

/// Whether a task writes what uses (of a resident layer) or fetches (of the host's copy) read.
bool overwrites_weights(TaskKind kind, bool resident) noexcept {
  if (resident) {
    return kind == TaskKind::push_weights || kind == TaskKind::update_resident || kind == TaskKind::update_streamed;
  }
  return kind == TaskKind::update_cpu || kind == TaskKind::store_weights || kind == TaskKind::speculate ||
         kind == TaskKind::retract;
}

}  // namespace

UpdateTasks::UpdateTasks(LoweringState& state, WeightRing& weights)
    : state_(state),
      weights_(weights),
      state_buffers_(state.plan.state_buffers),
      file_buffers_(state.plan.file_buffers) {}

void UpdateTasks::update_layer(LayerIndex layer, TaskList& out) {
  const IndexRange<SubgroupIndex>& subgroups = state_.subgroups_of(layer);
  if (subgroups.empty()) return;
  weights_.begin_update(layer);
  state_.set_speculated(layer, false);
  for (const SubgroupIndex s : subgroups) {
    const Subgroup& group = state_.subgroup(s);
    if (group.count() == 0) continue;
    if (group.updater == Updater::cpu && group.tier != Tier::file) {
      update_on_cpu(s, out);
    } else {
      update_in_pieces(s, out);
    }
  }
  weights_.end_update(layer, out);
}

Task& UpdateTasks::emit(TaskList& out, TaskKind kind, Lane lane, const Task& piece) {
  Task& task = state_.emit_like(out, piece, kind, lane);
  // Readers of the old weights: uses of residents, fetches of the host's copy.
  if (overwrites_weights(kind, state_.placement(piece.layer).resident)) out.depends_on(weights_.readers(piece.layer));
  return task;
}

/// The update of [begin, end) of a subgroup, yet without kind and lane.
Task UpdateTasks::task_of(SubgroupIndex subgroup, std::int64_t begin, std::int64_t end) const {
  Task task;
  task.layer = layer_of(state_.subgroup(subgroup));
  task.priority = priority_update + task.layer.number();
  task.step = state_.step;
  task.subgroup = subgroup;
  task.begin = begin;
  task.end = end;
  return task;
}

StateFormat UpdateTasks::format_of(const Task& piece) const {
  return state_.plan.format_of(state_.subgroup(piece.subgroup));
}

void UpdateTasks::depend_on_users_before(const Task& piece, TaskList& out) const {
  depend_on_users(gradient_before_, piece.begin, piece.end, out);
  depend_on_users(state_before_, piece.begin, piece.end, out);
}

// -- on the CPU ------------------------------------------------------------------------------------

void UpdateTasks::update_on_cpu(SubgroupIndex subgroup, TaskList& out) {
  const Subgroup& group = state_.subgroup(subgroup);
  SubgroupUsers& users = state_.users(subgroup);
  const Task whole = task_of(subgroup, group.begin, group.end);
  const TaskId update = emit(out, TaskKind::update_cpu, Lane::cpu, whole).id;
  depend_on_users(users.of_gradient, group.begin, group.end, out);
  depend_on_users(users.of_state, group.begin, group.end, out);
  users.of_gradient = {{group.begin, group.end, update}};
  users.of_state.clear();
  if (state_.placement(layer_of(group)).resident) {
    push_weights(whole, update, out);
  } else {
    users.of_state = users.of_gradient;
    weights_.add_writer(layer_of(group), update);
  }
}

/// Into the resident layer, out of the host's weights, which the next update rewrites.
void UpdateTasks::push_weights(const Task& piece, TaskId updated, TaskList& out) {
  Task& push = emit(out, TaskKind::push_weights, Lane::host_to_device, piece);
  push.bytes = weight_bytes(format_of(piece), push.count());
  out.depends_on(updated);
  state_.users(piece.subgroup).of_state.push_back({piece.begin, piece.end, push.id});
  weights_.add_writer(piece.layer, push.id);
}

// -- before the norm is known ------------------------------------------------------------------------

template <class Body>
void UpdateTasks::for_speculating(LayerIndex layer, Body body) const {
  for (const SubgroupIndex s : state_.subgroups_of(layer)) {
    if (state_.subgroup(s).speculates && state_.subgroup(s).count() > 0) body(s);
  }
}

/// Emits a task of a subgroup that uses its gradient and writes its state.
void UpdateTasks::emit_on_state(SubgroupIndex subgroup, TaskKind kind, TaskList& out) {
  const Subgroup& group = state_.subgroup(subgroup);
  SubgroupUsers& users = state_.users(subgroup);
  const TaskId id = emit(out, kind, Lane::cpu, task_of(subgroup, group.begin, group.end)).id;
  depend_on_users(users.of_gradient, group.begin, group.end, out);
  depend_on_users(users.of_state, group.begin, group.end, out);
  users.of_gradient = {{group.begin, group.end, id}};
  users.of_state = users.of_gradient;
}

void UpdateTasks::speculate_layer(LayerIndex layer, std::span<const TaskId> norm_tasks, TaskList& out) {
  for_speculating(layer, [&](SubgroupIndex subgroup) {
    emit_on_state(subgroup, TaskKind::speculate, out);
    out.depends_on(norm_tasks);
    state_.set_speculated(layer, true);
  });
}

void UpdateTasks::retract_layer(LayerIndex layer, TaskList& out) {
  if (!state_.speculated(layer)) return;
  for_speculating(layer, [&](SubgroupIndex subgroup) {
    emit_on_state(subgroup, TaskKind::retract, out);
    if (!state_.placement(layer).resident) weights_.add_writer(layer, out.back().id);
  });
  state_.set_speculated(layer, false);
}

// -- in pieces -------------------------------------------------------------------------------------

void UpdateTasks::update_in_pieces(SubgroupIndex subgroup, TaskList& out) {
  const Subgroup& group = state_.subgroup(subgroup);
  SubgroupUsers& users = state_.users(subgroup);
  gradient_before_.swap(users.of_gradient);
  state_before_.swap(users.of_state);
  users.of_gradient.clear();
  users.of_state.clear();
  const bool stays = group.tier == Tier::device && state_.placement(layer_of(group)).resident;
  for_pieces(state_.plan, group, stays, [&](std::int64_t begin, std::int64_t end) {
    const Task piece = task_of(subgroup, begin, end);
    group.updater == Updater::cpu ? update_piece_on_cpu(piece, out) : update_piece_on_device(piece, out);
  });
}

/// Takes a buffer on the host for a piece of state that lives in the file, and fills it.
TaskId UpdateTasks::read_piece(Task& piece, TaskList& out) {
  piece.file_buffer = file_buffers_.take();
  Task& read = state_.emit_like(out, piece, TaskKind::read_state, Lane::file_read);
  read.bytes = file_state_bytes(piece.count(), format_of(piece));
  depend_on_users(state_before_, piece.begin, piece.end, out);
  out.depends_on(file_buffers_.user(piece.file_buffer));
  return read.id;
}

/// Back to its place once `updated` has it in its buffer.
TaskId UpdateTasks::write_piece(const Task& piece, TaskId updated, TaskList& out) {
  Task& write = state_.emit_like(out, piece, TaskKind::write_state, Lane::file_write);
  write.bytes = file_state_bytes(piece.count(), format_of(piece));
  out.depends_on(updated);
  file_buffers_.user(piece.file_buffer) = write.id;
  return write.id;
}

void UpdateTasks::update_piece_on_cpu(Task piece, TaskList& out) {
  SubgroupUsers& users = state_.users(piece.subgroup);
  const TaskId read = read_piece(piece, out);
  const TaskId update = emit(out, TaskKind::update_cpu, Lane::cpu, piece).id;
  out.depends_on(read);
  depend_on_users(gradient_before_, piece.begin, piece.end, out);
  users.of_gradient.push_back({piece.begin, piece.end, update});
  users.of_state.push_back({piece.begin, piece.end, write_piece(piece, update, out)});
  if (state_.placement(piece.layer).resident) {
    push_weights(piece, update, out);
  } else {
    weights_.add_writer(piece.layer, update);
  }
}

/// Emits the update of a piece on the device. Its first task, the load where streamed and the update where resident,
/// waits for who used its elements.
void UpdateTasks::update_piece_on_device(Task piece, TaskList& out) {
  const Subgroup& group = state_.subgroup(piece.subgroup);
  const bool streamed = group.tier != Tier::device;
  const bool weights_resident = state_.placement(layer_of(group)).resident;
  const TaskId read = group.tier == Tier::file ? read_piece(piece, out) : no_task;
  if (streamed) piece.buffer = state_buffers_.take();
  if (!weights_resident) piece.staging = state_.staging.take();
  const bool loads = streamed || state_.plan.loads_weights(group);
  const TaskId loaded = loads ? load_piece(piece, read, out) : no_task;
  const TaskKind kind = streamed ? TaskKind::update_streamed : TaskKind::update_resident;
  const TaskId update = emit(out, kind, Lane::device, piece).id;
  out.depends_on(loaded);
  if (!loads) depend_on_users_before(piece, out);
  if (!weights_resident) out.depends_on(state_.staging.user(piece.staging));
  state_.users(piece.subgroup).of_gradient.push_back({piece.begin, piece.end, update});
  if (weights_resident) weights_.add_writer(layer_of(group), update);
  store_piece(piece, update, out);
}

/// Loads the parts of a piece's update that lie on the host: streamed state, with its gradient where that lies there,
/// and weights.
TaskId UpdateTasks::load_piece(const Task& piece, TaskId read, TaskList& out) {
  const Subgroup& group = state_.subgroup(piece.subgroup);
  const bool streamed = group.tier != Tier::device;
  const bool loads_weights = state_.plan.loads_weights(group);
  const StateFormat format = format_of(piece);
  Task& load = emit(out, TaskKind::load_state, Lane::host_to_device, piece);
  if (streamed) {
    load.bytes = state_bytes(format, piece.count());
    if (!group.gradient_on_device) load.bytes += gradient_bytes(format, piece.count());
  }
  if (loads_weights) load.bytes += weight_bytes(format, piece.count());
  out.depends_on(read);
  depend_on_users_before(piece, out);
  if (streamed) out.depends_on(state_buffers_.user(piece.buffer));
  if (loads_weights) out.depends_on(state_.staging.user(piece.staging));
  return load.id;
}

/// Back to the host, what lives there: weights and streamed state.
void UpdateTasks::store_piece(const Task& piece, TaskId updated, TaskList& out) {
  const Subgroup& group = state_.subgroup(piece.subgroup);
  std::vector<RangeUse>& users = state_.users(piece.subgroup).of_state;
  const bool streamed = group.tier != Tier::device;
  const bool weights_resident = state_.placement(layer_of(group)).resident;
  if (!weights_resident) {
    const std::uint64_t bytes = weight_bytes(format_of(piece), piece.count());
    const TaskId stored = store(piece, TaskKind::store_weights, bytes, updated, out);
    state_.staging.user(piece.staging) = stored;
    weights_.add_writer(layer_of(group), stored);
    // Split state: the weights are half of the next update's master.
    users.push_back({piece.begin, piece.end, stored});
  }
  if (streamed) {
    const std::uint64_t bytes = state_bytes(format_of(piece), piece.count());
    const TaskId stored = store(piece, TaskKind::store_state, bytes, updated, out);
    state_buffers_.user(piece.buffer) = stored;
    const TaskId last = group.tier == Tier::file ? write_piece(piece, stored, out) : stored;
    users.push_back({piece.begin, piece.end, last});
  }
  if (weights_resident && !streamed) users.push_back({piece.begin, piece.end, updated});
}

/// Stores a piece in its turn: the next piece's load waits for the buffer of state, its update for the staging.
TaskId UpdateTasks::store(const Task& piece, TaskKind kind, std::uint64_t bytes, TaskId updated, TaskList& out) {
  Task& task = emit(out, kind, Lane::device_to_host, piece);
  task.priority = priority_gradient;
  task.bytes = bytes;
  out.depends_on(updated);
  return task.id;
}

}  // namespace tandem
