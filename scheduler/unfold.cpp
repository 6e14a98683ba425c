#include "scheduler/unfold.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/error.hpp"
#include "core/update_kernels.hpp"

namespace tandem {
namespace {

// What somebody waits for right now comes first, then gradients (they free buffers that backward
// needs), then updates.
constexpr int priority_fetch = 0;
constexpr int priority_gradient = 1;
constexpr int priority_update = 2;

void append(std::vector<TaskId>& to, const std::vector<TaskId>& from) { to.insert(to.end(), from.begin(), from.end()); }

/// Whether a task writes what visits (of a resident layer) or fetches (of the host's copy) read.
bool overwrites_weights(TaskKind kind, bool resident) noexcept {
  if (resident) {
    return kind == TaskKind::push_weights || kind == TaskKind::update_resident || kind == TaskKind::update_streamed;
  }
  return kind == TaskKind::update_cpu || kind == TaskKind::store_weights;
}

}  // namespace

Unfolder::Unfolder(const ParameterLayout& layout, const Plan& plan, TaskCount begin)
    : layout_(layout), plan_(plan), next_id_(begin.next_id), step_(begin.steps - 1) {
  layers_.resize(static_cast<std::size_t>(layout.layer_count()));
  for (int l = 0; l < layout.layer_count(); ++l) {
    LayerState& state = state_of(l);
    state.touched.push_back(l);
    state.touchers.push_back(l);
    if (layout.layer(l).state_elements > 0) ++layers_to_commit_;
    for (const int owner : layout.layer(l).borrows) {
      state.touched.push_back(owner);
      ++state_of(owner).contributors;
      state_of(owner).touchers.push_back(l);
    }
  }
  subgroups_.resize(plan.subgroups.size());
  for (int s = 0; s < static_cast<int>(plan.subgroups.size()); ++s) {
    LayerState& state = state_of(plan.subgroups[static_cast<std::size_t>(s)].layer);
    if (state.subgroup_count++ == 0) state.first_subgroup = s;
  }
  for (int c = 0; c < static_cast<int>(plan.size_classes.size()); ++c) {
    const SizeClass& size = plan.size_classes[static_cast<std::size_t>(c)];
    Buffer empty;
    empty.size_class = c;
    weight_buffers_.insert(weight_buffers_.end(), static_cast<std::size_t>(size.weight_buffers), empty);
    gradient_buffers_.insert(gradient_buffers_.end(), static_cast<std::size_t>(size.gradient_buffers), empty);
  }
  staging_users_.resize(static_cast<std::size_t>(plan.staging_pieces), no_task);
  state_buffer_users_.resize(static_cast<std::size_t>(plan.state_buffers), no_task);
}

std::int64_t Unfolder::weight_buffer_elements(int buffer) const {
  const int c = weight_buffers_.at(static_cast<std::size_t>(buffer)).size_class;
  return plan_.size_classes[static_cast<std::size_t>(c)].weight_elements;
}

std::int64_t Unfolder::gradient_buffer_elements(int buffer) const {
  const int c = gradient_buffers_.at(static_cast<std::size_t>(buffer)).size_class;
  return plan_.size_classes[static_cast<std::size_t>(c)].gradient_elements;
}

Task& Unfolder::emit(TaskList& out, TaskKind kind, Lane lane, int priority, int layer) {
  Task task;
  task.priority = priority;
  task.layer = layer;
  task.step = step_;
  return emit_like(out, task, kind, lane);
}

void Unfolder::begin_step(int micro_batches, bool update_in_backward) {
  ++step_;
  update_in_backward_ = update_in_backward;
  norm_tasks_.clear();
  direction_ = Direction::forward;
  position_ = -1;
  micro_ = 0;
  micro_batches_ = micro_batches;
  layers_committed_ = 0;
  for (LayerState& layer : layers_) {
    if (layer.gradient_buffer >= 0) {  // left by an abandoned step
      Buffer& buffer = gradient_buffers_[static_cast<std::size_t>(layer.gradient_buffer)];
      append(buffer.users, layer.commit_tasks);
      buffer.holders = 0;
      layer.gradient_buffer = -1;
    }
    layer.commits = 0;
    layer.commit_tasks.clear();
  }
}

void Unfolder::begin_evaluation() {
  direction_ = Direction::evaluation;
  position_ = -1;
}

void Unfolder::end_pass() {
  direction_ = Direction::none;
  position_ = -1;
}

// -- weights ---------------------------------------------------------------------------------------

int Unfolder::steps_until(int layer) const noexcept {
  const int last = layout_.layer_count() - 1;
  if (direction_ == Direction::backward) return layer < position_ ? position_ - layer : position_ + layer + 1;
  if (layer > position_) return layer - position_;
  if (direction_ == Direction::forward) return (last - position_) + (last - layer) + 1;
  return last - position_ + layer + 1;
}

int Unfolder::distance_to(int layer) const noexcept {
  int nearest = std::numeric_limits<int>::max();
  for (const int toucher : layers_[static_cast<std::size_t>(layer)].touchers) {
    nearest = std::min(nearest, steps_until(toucher));
  }
  return nearest;
}

int Unfolder::acquire_weight_buffer(int layer, bool only_idle, TaskList& out) {
  const int size_class = plan_.layers[static_cast<std::size_t>(layer)].size_class;
  int best = -1;
  int best_distance = -1;
  for (int b = 0; b < weight_buffer_count(); ++b) {
    const Buffer& buffer = weight_buffers_[static_cast<std::size_t>(b)];
    if (buffer.size_class != size_class || buffer.holders > 0) continue;
    const int distance = buffer.layer < 0 ? std::numeric_limits<int>::max() : distance_to(buffer.layer);
    if (distance > best_distance) {
      best = b;
      best_distance = distance;
    }
  }
  // A prefetch must not push out what is needed sooner than itself.
  if (only_idle && (best < 0 || best_distance <= distance_to(layer))) return -1;
  if (best < 0) {
    throw MisuseError("no weight buffer is free for layer " + layout_.layer(layer).name,
                      "every buffer of its size is held by a guard", "release a layer before fetching the next");
  }
  load(layer, best, out);
  return best;
}

void Unfolder::load(int layer, int index, TaskList& out) {
  Buffer& buffer = weight_buffers_[static_cast<std::size_t>(index)];
  LayerState& state = state_of(layer);
  if (buffer.layer >= 0) state_of(buffer.layer).weight_buffer = -1;
  Task& fetch = emit(out, TaskKind::fetch_weights, Lane::host_to_device, priority_fetch, layer);
  fetch.end = layout_.layer(layer).elements;
  fetch.buffer = index;
  fetch.bytes = static_cast<std::uint64_t>(fetch.end) * 2;
  out.depends_on(buffer.users);
  out.depends_on(buffer.filled_by);
  out.depends_on(state.weight_writers);
  buffer.layer = layer;
  buffer.filled_by = fetch.id;
  buffer.users.clear();
  state.weight_buffer = index;
  // The next update of the host's copy must wait until this copy has been read.
  state.visits.push_back(fetch.id);
}

Visit Unfolder::visit(int layer, TaskList& out) {
  if (layer < 0 || layer >= layout_.layer_count()) throw MisuseError("no layer " + std::to_string(layer));
  position_ = layer;
  const std::vector<int>& needed = state_of(layer).touched;
  // Buffers already valid are held first, so that loading one layer cannot push out another of this visit.
  const auto hold_valid = [&](int by) {
    for (const int l : needed) {
      const int b = state_of(l).weight_buffer;
      if (b >= 0) weight_buffers_[static_cast<std::size_t>(b)].holders += by;
    }
  };
  hold_valid(1);
  Visit visit;
  before_.clear();
  for (const int l : needed) {
    const LayerState& state = state_of(l);
    if (plan_.layers[static_cast<std::size_t>(l)].resident) {
      append(before_, state.weight_writers);
      visit.weights.add({l, -1});
      continue;
    }
    int b = state.weight_buffer;
    if (b < 0) {
      try {
        b = acquire_weight_buffer(l, false, out);
      } catch (...) {
        hold_valid(-1);
        throw;
      }
      ++weight_buffers_[static_cast<std::size_t>(b)].holders;
    }
    before_.push_back(weight_buffers_[static_cast<std::size_t>(b)].filled_by);
    visit.weights.add({l, b});
  }
  visit.id = emit(out, TaskKind::visit, Lane::caller, priority_fetch, layer).id;
  out.depends_on(before_);
  for (const WeightPlace& place : visit.weights) {
    if (place.buffer >= 0) {
      weight_buffers_[static_cast<std::size_t>(place.buffer)].users.push_back(visit.id);
    } else {
      state_of(place.layer).visits.push_back(visit.id);
    }
  }
  ++open_visits_;
  if (direction_ == Direction::forward && layer == layout_.layer_count() - 1) direction_ = Direction::backward;
  return visit;
}

void Unfolder::release(const Visit& visit) {
  --open_visits_;
  for (const WeightPlace& place : visit.weights) {
    if (place.buffer >= 0) --weight_buffers_[static_cast<std::size_t>(place.buffer)].holders;
  }
}

void Unfolder::prefetch(TaskList& out) {
  if (direction_ == Direction::none) return;
  const int last = layout_.layer_count() - 1;
  const int step = direction_ == Direction::backward ? -1 : 1;
  int missing_budget = weight_buffer_count();
  for (int l = position_ + step; l >= 0 && l <= last && missing_budget > 0; l += step) {
    for (const int w : state_of(l).touched) {
      if (plan_.layers[static_cast<std::size_t>(w)].resident) continue;
      if (state_of(w).weight_buffer >= 0) continue;
      --missing_budget;
      acquire_weight_buffer(w, true, out);
    }
  }
}

// -- gradients ---------------------------------------------------------------------------------------

int Unfolder::acquire_gradient_buffer(int layer) {
  const int size_class = plan_.layers[static_cast<std::size_t>(layer)].size_class;
  int best = -1;
  for (int b = 0; b < gradient_buffer_count(); ++b) {
    const Buffer& buffer = gradient_buffers_[static_cast<std::size_t>(b)];
    if (buffer.size_class != size_class || buffer.holders > 0) continue;
    // The buffer whose last reader was emitted longest ago is the likeliest to be free.
    const auto age = [&](int index) {
      const auto& users = gradient_buffers_[static_cast<std::size_t>(index)].users;
      return users.empty() ? no_task : users.back();
    };
    if (best < 0 || age(b) < age(best)) best = b;
  }
  if (best < 0) {
    throw MisuseError("no gradient buffer is free for layer " + layout_.layer(layer).name,
                      "every buffer of its size holds gradients that are not committed", "commit in backward order");
  }
  Buffer& buffer = gradient_buffers_[static_cast<std::size_t>(best)];
  buffer.holders = 1;
  buffer.layer = layer;
  state_of(layer).gradient_buffer = best;
  return best;
}

GradientVisit Unfolder::gradients(int layer, TaskList& out) {
  if (layer < 0 || layer >= layout_.layer_count()) throw MisuseError("no layer " + std::to_string(layer));
  GradientVisit visit;
  before_.clear();
  for (const int l : state_of(layer).touched) {
    if (layout_.layer(l).state_elements == 0) continue;
    const LayerState& state = state_of(l);
    if (state.commits >= state.contributors) {
      throw MisuseError("gradients of layer " + layout_.layer(l).name + " are already committed in this micro-batch");
    }
    const bool fresh = state.gradient_buffer < 0;
    const int b = fresh ? acquire_gradient_buffer(l) : state.gradient_buffer;
    if (fresh) append(before_, gradient_buffers_[static_cast<std::size_t>(b)].users);
    // A second contributor adds to what the first has written.
    append(before_, state.commit_tasks);
    visit.gradients.add({l, b, fresh});
  }
  visit.id = emit(out, TaskKind::commit, Lane::caller, priority_gradient, layer).id;
  out.depends_on(before_);
  if (!visit.gradients.empty()) direction_ = Direction::backward;
  return visit;
}

void Unfolder::commit(const GradientVisit& visit, TaskList& out) {
  for (const GradientPlace& place : visit.gradients) {
    LayerState& state = state_of(place.layer);
    state.commit_tasks.push_back(visit.id);
    if (++state.commits == state.contributors) {
      send_gradient(place.layer, out);
      ++layers_committed_;
      if (update_in_backward_ && micro_ == micro_batches_ - 1) update_layer(place.layer, out);
    }
  }
  // A layer without state may be committed too, even behind the last one that counts.
  if (!visit.gradients.empty() && layers_committed_ == layers_to_commit_) finish_micro_batch();
}

void Unfolder::abandon(const GradientVisit& visit) {
  for (const GradientPlace& place : visit.gradients) {
    Buffer& buffer = gradient_buffers_[static_cast<std::size_t>(place.buffer)];
    buffer.users = {visit.id};
    append(buffer.users, state_of(place.layer).commit_tasks);
  }
}

void Unfolder::finish_micro_batch() {
  ++micro_;
  if (micro_ == micro_batches_) return;
  direction_ = Direction::forward;
  position_ = -1;
  layers_committed_ = 0;
  for (LayerState& layer : layers_) {
    layer.commits = 0;
    layer.commit_tasks.clear();
  }
}

bool Unfolder::gradients_complete() const noexcept { return micro_ == micro_batches_ || layers_to_commit_ == 0; }

int Unfolder::take_staging() noexcept {
  const int taken = next_staging_;
  next_staging_ = (next_staging_ + 1) % plan_.staging_pieces;
  return taken;
}

int Unfolder::take_state_buffer() noexcept {
  const int taken = next_state_buffer_;
  next_state_buffer_ = (next_state_buffer_ + 1) % plan_.state_buffers;
  return taken;
}

template <class Body>
void Unfolder::for_pieces(int subgroup, Body body) const {
  const Subgroup& group = plan_.subgroups[static_cast<std::size_t>(subgroup)];
  for (std::int64_t begin = group.begin; begin < group.end; begin += plan_.piece_elements) {
    body(begin, std::min(begin + plan_.piece_elements, group.end));
  }
}

void Unfolder::send_gradient(int layer, TaskList& out) {
  LayerState& state = state_of(layer);
  Buffer& buffer = gradient_buffers_[static_cast<std::size_t>(state.gradient_buffer)];
  buffer.users.clear();
  for (int s = state.first_subgroup; s < state.first_subgroup + state.subgroup_count; ++s) {
    // Whoever still uses the final gradient of the micro-batch or step before.
    std::vector<TaskId>& users = subgroups_[static_cast<std::size_t>(s)].gradient_users;
    before_.assign(users.begin(), users.end());
    users.clear();
    for_pieces(s, [&](std::int64_t begin, std::int64_t end) {
      Task piece;
      piece.priority = priority_gradient;
      piece.step = step_;
      piece.layer = layer;
      piece.subgroup = s;
      piece.begin = begin;
      piece.end = end;
      piece.buffer = state.gradient_buffer;
      piece.first_micro = micro_ == 0;
      piece.last_micro = micro_ == micro_batches_ - 1;
      if (plan_.subgroups[static_cast<std::size_t>(s)].gradient_on_device) {
        keep_piece(piece, out);
      } else {
        send_piece(piece, out);
      }
    });
  }
  buffer.holders = 0;
  buffer.layer = -1;
  state.gradient_buffer = -1;
}

Task& Unfolder::emit_like(TaskList& out, const Task& piece, TaskKind kind, Lane lane) {
  Task& task = out.add(piece);
  task.id = next_id_++;
  task.kind = kind;
  task.lane = lane;
  return task;
}

/// By way of staging to the host, where the final gradient is what `before_` uses.
void Unfolder::send_piece(Task piece, TaskList& out) {
  const LayerState& layer = state_of(piece.layer);
  piece.staging = take_staging();
  TaskId& staging_user = staging_users_[static_cast<std::size_t>(piece.staging)];
  const TaskId round = emit_like(out, piece, TaskKind::round_gradient, Lane::device).id;
  out.depends_on(layer.commit_tasks);
  out.depends_on(staging_user);
  gradient_buffers_[static_cast<std::size_t>(piece.buffer)].users.push_back(round);

  Task& flush = emit_like(out, piece, TaskKind::flush_gradient, Lane::device_to_host);
  flush.bytes = static_cast<std::uint64_t>(flush.count()) * 2;
  out.depends_on(round);
  out.depends_on(before_);
  staging_user = flush.id;

  const TaskId fold = emit_like(out, piece, TaskKind::fold_gradient, Lane::cpu).id;
  out.depends_on(staging_user);
  subgroups_[static_cast<std::size_t>(piece.subgroup)].gradient_users.push_back(fold);
  if (piece.last_micro) norm_tasks_.push_back(fold);
}

/// Into the final gradient on the device, which `before_` uses.
void Unfolder::keep_piece(const Task& piece, TaskList& out) {
  const LayerState& layer = state_of(piece.layer);
  auto& users = subgroups_[static_cast<std::size_t>(piece.subgroup)].gradient_users;
  const TaskId keep = emit_like(out, piece, TaskKind::keep_gradient, Lane::device).id;
  out.depends_on(layer.commit_tasks);
  out.depends_on(before_);
  gradient_buffers_[static_cast<std::size_t>(piece.buffer)].users.push_back(keep);
  users.push_back(keep);
  if (!piece.last_micro) return;
  Task& fetch = emit_like(out, piece, TaskKind::fetch_norm, Lane::device_to_host);
  fetch.bytes = static_cast<std::uint64_t>((fetch.count() + layout_quantum - 1) / layout_quantum) * sizeof(double);
  out.depends_on(keep);
  users.push_back(fetch.id);
  norm_tasks_.push_back(fetch.id);
}

void Unfolder::invalidate_weights() {
  if (open_visits_ > 0) throw MisuseError("weights were written while a layer is held");
  for (Buffer& buffer : weight_buffers_) {
    if (buffer.layer >= 0) state_of(buffer.layer).weight_buffer = -1;
    buffer.layer = -1;
  }
}

void Unfolder::forget_before(TaskId id) {
  const auto prune = [id](std::vector<TaskId>& list) { std::erase_if(list, [id](TaskId t) { return t < id; }); };
  for (Buffer& buffer : weight_buffers_) prune(buffer.users);
  for (Buffer& buffer : gradient_buffers_) prune(buffer.users);
  for (LayerState& layer : layers_) {
    prune(layer.visits);
    prune(layer.weight_writers);
  }
}

// -- updates -------------------------------------------------------------------------------------------

void Unfolder::update(TaskList& out) {
  if (update_in_backward_) return;
  for (int l = 0; l < layout_.layer_count(); ++l) update_layer(l, out);
}

void Unfolder::update_layer(int layer, TaskList& out) {
  LayerState& state = state_of(layer);
  if (state.subgroup_count == 0) return;
  state.weight_writers.clear();
  for (int s = state.first_subgroup; s < state.first_subgroup + state.subgroup_count; ++s) {
    if (plan_.subgroups[static_cast<std::size_t>(s)].updater == Updater::cpu) {
      update_on_cpu(s, out);
    } else {
      update_on_device(s, out);
    }
  }
  state.visits.clear();  // who reads from now on reads new weights
  if (state.weight_buffer >= 0) {
    weight_buffers_[static_cast<std::size_t>(state.weight_buffer)].layer = -1;
    state.weight_buffer = -1;
  }
}

Task& Unfolder::emit_update(TaskList& out, TaskKind kind, Lane lane, const Task& piece) {
  Task& task = emit_like(out, piece, kind, lane);
  // Whoever still reads the old weights: visits of residents, fetches of the host's copy.
  const bool resident = plan_.layers[static_cast<std::size_t>(piece.layer)].resident;
  if (overwrites_weights(kind, resident)) out.depends_on(state_of(piece.layer).visits);
  return task;
}

/// The update of [begin, end) of a subgroup, yet without kind and lane.
Task Unfolder::update_of(int subgroup, std::int64_t begin, std::int64_t end) const {
  Task task;
  task.priority = priority_update;
  task.step = step_;
  task.layer = plan_.subgroups[static_cast<std::size_t>(subgroup)].layer;
  task.subgroup = subgroup;
  task.begin = begin;
  task.end = end;
  return task;
}

void Unfolder::update_on_cpu(int subgroup, TaskList& out) {
  const Subgroup& group = plan_.subgroups[static_cast<std::size_t>(subgroup)];
  SubgroupState& users = subgroups_[static_cast<std::size_t>(subgroup)];
  LayerState& layer = state_of(group.layer);
  const Task whole = update_of(subgroup, group.begin, group.end);
  const TaskId update = emit_update(out, TaskKind::update_cpu, Lane::cpu, whole).id;
  out.depends_on(users.gradient_users);
  out.depends_on(users.state_users);
  users.gradient_users = {update};
  if (!plan_.layers[static_cast<std::size_t>(group.layer)].resident) {
    users.state_users = {update};
    layer.weight_writers.push_back(update);
    return;
  }
  Task& push = emit_update(out, TaskKind::push_weights, Lane::host_to_device, whole);
  push.bytes = static_cast<std::uint64_t>(push.count()) * 2;
  out.depends_on(update);
  users.state_users = {push.id};  // it reads the host's weights, which the next update rewrites
  layer.weight_writers.push_back(push.id);
}

void Unfolder::update_on_device(int subgroup, TaskList& out) {
  SubgroupState& users = subgroups_[static_cast<std::size_t>(subgroup)];
  before_.assign(users.gradient_users.begin(), users.gradient_users.end());
  append(before_, users.state_users);
  users.gradient_users.clear();
  users.state_users.clear();
  for_pieces(subgroup, [&](std::int64_t begin, std::int64_t end) { update_piece(subgroup, begin, end, out); });
}

/// Its first task, the load where streamed and the update where resident, waits for `before_`.
void Unfolder::update_piece(int subgroup, std::int64_t begin, std::int64_t end, TaskList& out) {
  const Subgroup& group = plan_.subgroups[static_cast<std::size_t>(subgroup)];
  SubgroupState& users = subgroups_[static_cast<std::size_t>(subgroup)];
  LayerState& layer = state_of(group.layer);
  const bool streamed = group.tier == Tier::host;
  const bool weights_resident = plan_.layers[static_cast<std::size_t>(group.layer)].resident;
  const bool loads_weights = plan_.loads_weights(group);
  Task piece = update_of(subgroup, begin, end);
  const auto count = static_cast<std::uint64_t>(piece.count());
  if (streamed) piece.buffer = take_state_buffer();
  if (!weights_resident) piece.staging = take_staging();
  const auto buffer = static_cast<std::size_t>(piece.buffer);
  const auto staging = static_cast<std::size_t>(piece.staging);
  TaskId loaded = no_task;
  if (streamed || loads_weights) {
    Task& load = emit_update(out, TaskKind::load_state, Lane::host_to_device, piece);
    if (streamed) load.bytes = count * (state_bytes(plan_.state) + (group.gradient_on_device ? 0 : 2));
    if (loads_weights) load.bytes += count * 2;
    loaded = load.id;
    out.depends_on(before_);
    if (streamed) out.depends_on(state_buffer_users_[buffer]);
    if (loads_weights) out.depends_on(staging_users_[staging]);
  }
  const TaskKind kind = streamed ? TaskKind::update_streamed : TaskKind::update_resident;
  const TaskId update = emit_update(out, kind, Lane::device, piece).id;
  out.depends_on(loaded);
  if (loaded == no_task) out.depends_on(before_);
  if (!weights_resident) out.depends_on(staging_users_[staging]);
  users.gradient_users.push_back(update);
  if (weights_resident) layer.weight_writers.push_back(update);
  if (streamed) {
    Task& store = emit_update(out, TaskKind::store_state, Lane::device_to_host, piece);
    store.bytes = count * state_bytes(plan_.state);
    out.depends_on(update);
    state_buffer_users_[buffer] = store.id;
    users.state_users.push_back(store.id);
  }
  if (!weights_resident) {
    Task& store = emit_update(out, TaskKind::store_weights, Lane::device_to_host, piece);
    store.bytes = count * 2;
    out.depends_on(update);
    staging_users_[staging] = store.id;
    layer.weight_writers.push_back(store.id);
    users.state_users.push_back(store.id);  // split state: the weights are half of the next update's master
  }
  if (weights_resident && !streamed) users.state_users.push_back(update);
}

}  // namespace tandem
