// Updates: of subgroups on the CPU, and of pieces of them on the device.
#include "core/tensor/layout_quantum.hpp"
#include "scheduler/tasks/lowering.hpp"
#include "scheduler/tasks/lowering_common.hpp"

namespace tandem {
namespace {

/// Whether a task writes what uses (of a resident layer) or fetches (of the host's copy) read.
bool overwrites_weights(TaskKind kind, bool resident) noexcept {
  if (resident) {
    return kind == TaskKind::push_weights || kind == TaskKind::update_resident || kind == TaskKind::update_streamed;
  }
  return kind == TaskKind::update_cpu || kind == TaskKind::store_weights;
}

}  // namespace

void Lowering::update(TaskList& out) {
  if (update_in_backward_) return;
  for (int l = 0; l < layout_.layer_count(); ++l) update_layer(l, out);
}

void Lowering::update_layer(int layer, TaskList& out) {
  LayerState& state = state_of(layer);
  if (state.subgroup_count == 0) return;
  state.weight_writers.clear();
  for (int s = state.first_subgroup; s < state.first_subgroup + state.subgroup_count; ++s) {
    const Subgroup& group = plan_.subgroups[static_cast<std::size_t>(s)];
    if (group.count() == 0) continue;
    if (group.updater == Updater::cpu && group.tier != Tier::file) {
      update_on_cpu(s, out);
    } else {
      update_in_pieces(s, out);
    }
  }
  state.stale = plan_.rank.count > 1 && plan_.layers[static_cast<std::size_t>(layer)].resident;
  if (state.stale) append(state.stale_readers, state.uses);
  state.uses.clear();  // who reads from now on reads new weights
  if (state.weight_buffer >= 0) {
    weight_buffers_[static_cast<std::size_t>(state.weight_buffer)].layer = -1;
    state.weight_buffer = -1;
  }
}

Task& Lowering::emit_update(TaskList& out, TaskKind kind, Lane lane, const Task& piece) {
  Task& task = emit_like(out, piece, kind, lane);
  // Whoever still reads the old weights: uses of residents, fetches of the host's copy.
  const bool resident = plan_.layers[static_cast<std::size_t>(piece.layer)].resident;
  if (overwrites_weights(kind, resident)) out.depends_on(state_of(piece.layer).uses);
  return task;
}

/// The update of [begin, end) of a subgroup, yet without kind and lane.
Task Lowering::update_of(int subgroup, std::int64_t begin, std::int64_t end) const {
  Task task;
  task.priority = priority_update;
  task.step = step_;
  task.layer = plan_.subgroups[static_cast<std::size_t>(subgroup)].layer;
  task.subgroup = subgroup;
  task.begin = begin;
  task.end = end;
  return task;
}

void Lowering::update_on_cpu(int subgroup, TaskList& out) {
  const Subgroup& group = plan_.subgroups[static_cast<std::size_t>(subgroup)];
  SubgroupState& users = subgroups_[static_cast<std::size_t>(subgroup)];
  const Task whole = update_of(subgroup, group.begin, group.end);
  const TaskId update = emit_update(out, TaskKind::update_cpu, Lane::cpu, whole).id;
  depend_on_users(users.gradient_users, group.begin, group.end, out);
  depend_on_users(users.state_users, group.begin, group.end, out);
  users.gradient_users = {{group.begin, group.end, update}};
  users.state_users.clear();
  if (plan_.layers[static_cast<std::size_t>(group.layer)].resident) {
    push_weights(whole, update, out);
  } else {
    users.state_users = users.gradient_users;
    state_of(group.layer).weight_writers.push_back(update);
  }
}

/// Into the resident layer, out of the host's weights, which the next update rewrites.
void Lowering::push_weights(const Task& piece, TaskId updated, TaskList& out) {
  Task& push = emit_update(out, TaskKind::push_weights, Lane::host_to_device, piece);
  push.bytes = static_cast<std::uint64_t>(push.count()) * 2;
  out.depends_on(updated);
  subgroups_[static_cast<std::size_t>(piece.subgroup)].state_users.push_back({piece.begin, piece.end, push.id});
  state_of(piece.layer).weight_writers.push_back(push.id);
}

void Lowering::update_in_pieces(int subgroup, TaskList& out) {
  SubgroupState& users = subgroups_[static_cast<std::size_t>(subgroup)];
  gradient_before_.swap(users.gradient_users);
  state_before_.swap(users.state_users);
  users.gradient_users.clear();
  users.state_users.clear();
  const bool on_cpu = plan_.subgroups[static_cast<std::size_t>(subgroup)].updater == Updater::cpu;
  for_update_pieces(subgroup, [&](std::int64_t begin, std::int64_t end) {
    const Task piece = update_of(subgroup, begin, end);
    on_cpu ? update_piece_on_cpu(piece, out) : update_piece_on_device(piece, out);
  });
}

/// Takes a buffer on the host for a piece of state that lives in the file, and fills it.
TaskId Lowering::read_piece(Task& piece, TaskList& out) {
  piece.file_buffer = take_file_buffer();
  Task& read = emit_like(out, piece, TaskKind::read_state, Lane::file_read);
  read.bytes = file_state_bytes(piece.count(), plan_.state);
  depend_on_users(state_before_, piece.begin, piece.end, out);
  out.depends_on(file_buffer_users_[static_cast<std::size_t>(piece.file_buffer)]);
  return read.id;
}

/// Back to its place once `updated` has it in its buffer.
TaskId Lowering::write_piece(const Task& piece, TaskId updated, TaskList& out) {
  Task& write = emit_like(out, piece, TaskKind::write_state, Lane::file_write);
  write.bytes = file_state_bytes(piece.count(), plan_.state);
  out.depends_on(updated);
  file_buffer_users_[static_cast<std::size_t>(piece.file_buffer)] = write.id;
  return write.id;
}

void Lowering::update_piece_on_cpu(Task piece, TaskList& out) {
  SubgroupState& users = subgroups_[static_cast<std::size_t>(piece.subgroup)];
  const TaskId read = read_piece(piece, out);
  const TaskId update = emit_update(out, TaskKind::update_cpu, Lane::cpu, piece).id;
  out.depends_on(read);
  depend_on_users(gradient_before_, piece.begin, piece.end, out);
  users.gradient_users.push_back({piece.begin, piece.end, update});
  users.state_users.push_back({piece.begin, piece.end, write_piece(piece, update, out)});
  if (plan_.layers[static_cast<std::size_t>(piece.layer)].resident) {
    push_weights(piece, update, out);
  } else {
    state_of(piece.layer).weight_writers.push_back(update);
  }
}

/// Its first task, the load where streamed and the update where resident, waits for who used its elements.
void Lowering::update_piece_on_device(Task piece, TaskList& out) {
  const Subgroup& group = plan_.subgroups[static_cast<std::size_t>(piece.subgroup)];
  SubgroupState& users = subgroups_[static_cast<std::size_t>(piece.subgroup)];
  LayerState& layer = state_of(group.layer);
  const std::int64_t begin = piece.begin, end = piece.end;
  const bool streamed = group.tier != Tier::device;
  const bool in_file = group.tier == Tier::file;
  const bool weights_resident = plan_.layers[static_cast<std::size_t>(group.layer)].resident;
  const bool loads_weights = plan_.loads_weights(group);
  const auto count = static_cast<std::uint64_t>(piece.count());
  const TaskId read = in_file ? read_piece(piece, out) : no_task;
  if (streamed) piece.buffer = take_state_buffer();
  if (!weights_resident) piece.staging = take_staging();
  const auto buffer = static_cast<std::size_t>(piece.buffer);
  const auto staging = static_cast<std::size_t>(piece.staging);
  const auto wait_for_users = [&] {
    depend_on_users(gradient_before_, begin, end, out);
    depend_on_users(state_before_, begin, end, out);
  };
  TaskId loaded = no_task;
  if (streamed || loads_weights) {
    Task& load = emit_update(out, TaskKind::load_state, Lane::host_to_device, piece);
    if (streamed) load.bytes = state_bytes(plan_.state, piece.count()) + (group.gradient_on_device ? 0 : 2 * count);
    if (loads_weights) load.bytes += count * 2;
    loaded = load.id;
    out.depends_on(read);
    wait_for_users();
    if (streamed) out.depends_on(state_buffer_users_[buffer]);
    if (loads_weights) out.depends_on(staging_users_[staging]);
  }
  const TaskKind kind = streamed ? TaskKind::update_streamed : TaskKind::update_resident;
  const TaskId update = emit_update(out, kind, Lane::device, piece).id;
  out.depends_on(loaded);
  if (loaded == no_task) wait_for_users();
  if (!weights_resident) out.depends_on(staging_users_[staging]);
  users.gradient_users.push_back({begin, end, update});
  if (weights_resident) layer.weight_writers.push_back(update);
  // In its turn: the next piece's load waits for the buffer of state, its update for the staging.
  const auto send_back = [&](TaskKind what, std::uint64_t bytes) {
    Task& store = emit_update(out, what, Lane::device_to_host, piece);
    store.priority = priority_gradient;
    store.bytes = bytes;
    out.depends_on(update);
    return store.id;
  };
  if (!weights_resident) {
    const TaskId stored = staging_users_[staging] = send_back(TaskKind::store_weights, count * 2);
    layer.weight_writers.push_back(stored);
    users.state_users.push_back({begin, end, stored});  // split state: the weights are half of the next update's master
  }
  if (streamed) {
    const TaskId stored = state_buffer_users_[buffer] =
        send_back(TaskKind::store_state, state_bytes(plan_.state, piece.count()));
    const TaskId last = in_file ? write_piece(piece, stored, out) : stored;
    users.state_users.push_back({begin, end, last});
  }
  if (weights_resident && !streamed) users.state_users.push_back({begin, end, update});
}

}  // namespace tandem
