#include "scheduler/tasks/lowering.hpp"

#include <algorithm>
#include <limits>

#include "core/base/error.hpp"
#include "scheduler/plan/rank_slice.hpp"
#include "scheduler/tasks/lowering_common.hpp"

namespace tandem {

Lowering::Lowering(const ParameterLayout& layout, const Plan& plan, TaskCount begin)
    : layout_(layout), plan_(plan), next_id_(begin.next_id), step_(begin.steps - 1) {
  layers_.resize(static_cast<std::size_t>(layout.layer_count()));
  for (int l = 0; l < layout.layer_count(); ++l) {
    LayerState& state = state_of(l);
    state.touched.push_back(l);
    state.touchers.push_back(l);
    if (layout.layer(l).state_elements > 0) ++layers_to_commit_;
    for (const int owner : layout.layer(l).borrows) {
      state.touched.push_back(owner);
      if (plan.adds_to(owner, l)) ++state_of(owner).contributors;
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
    WeightBuffer weights;
    weights.size_class = c;
    weight_buffers_.insert(weight_buffers_.end(), static_cast<std::size_t>(size.weight_buffers), weights);
    GradientBuffer gradients;
    gradients.size_class = c;
    gradient_buffers_.insert(gradient_buffers_.end(), static_cast<std::size_t>(size.gradient_buffers), gradients);
    ReceiveBuffer receive_buffer;
    receive_buffer.size_class = c;
    receive_buffers_.insert(receive_buffers_.end(), static_cast<std::size_t>(size.receive_buffers), receive_buffer);
    SumBuffer sums;
    sums.size_class = c;
    sum_buffers_.insert(sum_buffers_.end(), static_cast<std::size_t>(size.sum_buffers), sums);
  }
  invalidate_weights();
  staging_users_.resize(static_cast<std::size_t>(plan.staging_pieces), no_task);
  state_buffer_users_.resize(static_cast<std::size_t>(plan.state_buffers), no_task);
  file_buffer_users_.resize(static_cast<std::size_t>(plan.file_buffers), no_task);
}

std::int64_t Lowering::weight_buffer_elements(int buffer) const {
  const int c = weight_buffers_.at(static_cast<std::size_t>(buffer)).size_class;
  return plan_.size_classes[static_cast<std::size_t>(c)].weight_elements;
}

std::int64_t Lowering::gradient_buffer_elements(int buffer) const {
  const int c = gradient_buffers_.at(static_cast<std::size_t>(buffer)).size_class;
  return plan_.size_classes[static_cast<std::size_t>(c)].gradient_elements;
}

Task& Lowering::emit(TaskList& out, TaskKind kind, Lane lane, int priority, int layer) {
  Task task;
  task.priority = priority;
  task.layer = layer;
  task.step = step_;
  return emit_like(out, task, kind, lane);
}

Task& Lowering::emit_like(TaskList& out, const Task& piece, TaskKind kind, Lane lane) {
  Task& task = out.add(piece);
  task.id = next_id_++;
  task.kind = kind;
  task.lane = lane;
  return task;
}

int Lowering::take_staging() noexcept {
  const int taken = next_staging_;
  next_staging_ = (next_staging_ + 1) % plan_.staging_pieces;
  return taken;
}

int Lowering::take_state_buffer() noexcept {
  const int taken = next_state_buffer_;
  next_state_buffer_ = (next_state_buffer_ + 1) % plan_.state_buffers;
  return taken;
}

int Lowering::take_file_buffer() noexcept {
  const int taken = next_file_buffer_;
  next_file_buffer_ = (next_file_buffer_ + 1) % plan_.file_buffers;
  return taken;
}

void Lowering::begin_step(int micro_batches, bool update_in_backward) {
  ++step_;
  update_in_backward_ = update_in_backward;
  norm_tasks_.clear();
  complete_layers_.clear();
  micro_batches_ = micro_batches;
  for (GradientBuffer& buffer : gradient_buffers_) {
    if (buffer.layer < 0) continue;  // else left by an abandoned step
    append(buffer.users, buffer.commit_tasks);
    buffer.layer = -1;
  }
  for (SumBuffer& buffer : sum_buffers_) buffer.layer = -1;
  for (LayerState& layer : layers_) {
    if (layer.asked > 0) layer.needed_in_backward = layer.used_in_backward;
    layer.used_in_backward = false;
    layer.asked = layer.committed = 0;
  }
  layer_at_work_ = -1;
  open_micro_batches(0);
}

/// As many as pass through the layers at once, or as are left: forward through all layers, then backward.
void Lowering::open_micro_batches(int first) {
  direction_ = Direction::forward;
  position_ = -1;
  micro_end_ = std::min(first + plan_.micro_batches_at_once, micro_batches_);
  gradients_left_ = layers_to_commit_ * (micro_end_ - first);
}

void Lowering::begin_evaluation() {
  direction_ = Direction::evaluation;
  position_ = -1;
}

void Lowering::end_pass() {
  direction_ = Direction::none;
  position_ = -1;
}

void Lowering::invalidate_weights() {
  if (open_visits_ > 0) throw MisuseError("weights were written while a layer is held");
  for (WeightBuffer& buffer : weight_buffers_) {
    if (buffer.layer >= 0) state_of(buffer.layer).weight_buffer = -1;
    buffer.layer = -1;
  }
  if (plan_.rank.count == 1) return;
  for (std::size_t l = 0; l < layers_.size(); ++l) layers_[l].stale = plan_.layers[l].resident;
}

void Lowering::forget_before(TaskId id) {
  const auto prune = [id](std::vector<TaskId>& list) { std::erase_if(list, [id](TaskId t) { return t < id; }); };
  for (WeightBuffer& buffer : weight_buffers_) prune(buffer.users);
  for (GradientBuffer& buffer : gradient_buffers_) prune(buffer.users);
  for (ReceiveBuffer& buffer : receive_buffers_) {
    prune(buffer.users);
    prune(buffer.filled_by);
  }
  for (SumBuffer& buffer : sum_buffers_) {
    std::erase_if(buffer.users, [id](const Use& use) { return use.task < id; });
  }
  for (LayerState& layer : layers_) {
    prune(layer.uses);
    prune(layer.weight_writers);
    prune(layer.stale_readers);
  }
}

void Lowering::depend_on_users(const std::vector<Use>& users, std::int64_t begin, std::int64_t end, TaskList& out) {
  const auto first = std::partition_point(users.begin(), users.end(), [=](const Use& use) { return use.end <= begin; });
  for (auto use = first; use != users.end() && use->begin < end; ++use) out.depends_on(use->task);
}

const std::vector<TaskId>& Lowering::fillers_of(const Task& piece) const {
  return piece.receive_buffer < 0 ? gradient_buffers_[static_cast<std::size_t>(piece.buffer)].commit_tasks
                                  : receive_buffers_[static_cast<std::size_t>(piece.receive_buffer)].filled_by;
}

std::vector<TaskId>& Lowering::users_of(const Task& piece) {
  return piece.receive_buffer < 0 ? gradient_buffers_[static_cast<std::size_t>(piece.buffer)].users
                                  : receive_buffers_[static_cast<std::size_t>(piece.receive_buffer)].users;
}

// -- weights ---------------------------------------------------------------------------------------

int Lowering::steps_until(int layer) const noexcept {
  const int last = layout_.layer_count() - 1;
  if (direction_ == Direction::backward) {
    const bool comes = layer < position_ && layers_[static_cast<std::size_t>(layer)].needed_in_backward;
    return comes ? position_ - layer : position_ + layer + 1;
  }
  if (layer > position_) return layer - position_;
  if (direction_ == Direction::forward) return (last - position_) + (last - layer) + 1;
  return last - position_ + layer + 1;
}

int Lowering::distance_to(int layer) const noexcept {
  int nearest = std::numeric_limits<int>::max();
  for (const int toucher : layers_[static_cast<std::size_t>(layer)].touchers) {
    nearest = std::min(nearest, steps_until(toucher));
  }
  return nearest;
}

int Lowering::acquire_weight_buffer(int layer, bool only_idle, TaskList& out) {
  const int size_class = plan_.layers[static_cast<std::size_t>(layer)].size_class;
  int best = -1;
  int best_distance = -1;
  for (int b = 0; b < weight_buffer_count(); ++b) {
    const WeightBuffer& buffer = weight_buffers_[static_cast<std::size_t>(b)];
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

void Lowering::load(int layer, int index, TaskList& out) {
  WeightBuffer& buffer = weight_buffers_[static_cast<std::size_t>(index)];
  LayerState& state = state_of(layer);
  if (buffer.layer >= 0) state_of(buffer.layer).weight_buffer = -1;
  Task& fetch = emit(out, TaskKind::fetch_weights, Lane::host_to_device, priority_fetch, layer);
  fetch.end = layout_.layer(layer).elements;
  fetch.buffer = index;
  fetch.bytes = static_cast<std::uint64_t>(slice_of(layout_.layer(layer), plan_.rank).count()) * 2;
  const TaskId fetched = fetch.id;
  out.depends_on(buffer.users);
  out.depends_on(buffer.filled_by);
  out.depends_on(state.weight_writers);
  buffer.layer = layer;
  buffer.filled_by = fetched;
  buffer.users.clear();
  state.weight_buffer = index;
  // The next update of the host's copy must wait until this copy has been read.
  state.uses.push_back(fetched);
  if (plan_.rank.count == 1) return;
  buffer.filled_by = gather(layer, index, out);
  out.depends_on(fetched);
}

/// What other ranks own of a layer, beside this one's own, which whoever calls this makes it wait for.
TaskId Lowering::gather(int layer, int buffer, TaskList& out) {
  const Layer& of = layout_.layer(layer);
  Task& gather = emit(out, TaskKind::gather_weights, Lane::peers, priority_fetch, layer);
  gather.end = of.elements;
  gather.buffer = buffer;
  gather.bytes = static_cast<std::uint64_t>(of.elements - slice_of(of, plan_.rank).count()) * 2;
  return gather.id;
}

void Lowering::gather_resident(int layer, TaskList& out) {
  LayerState& state = state_of(layer);
  const TaskId gathered = gather(layer, -1, out);
  out.depends_on(state.weight_writers);
  out.depends_on(state.stale_readers);
  state.stale = false;
  state.stale_readers.clear();
  state.weight_writers = {gathered};
  // Others read this rank's slice until then.
  state.uses.push_back(gathered);
}

/// A few of the layers that come next, where they stay on the device: what their ranks have updated.
void Lowering::prefetch_resident(TaskList& out) {
  constexpr int ahead = 2;
  const int last = layout_.layer_count() - 1;
  const int step = direction_ == Direction::backward ? -1 : 1;
  for (int l = position_ + step, left = ahead; l >= 0 && l <= last && left > 0; l += step, --left) {
    for (const int w : state_of(l).touched) {
      if (state_of(w).stale) gather_resident(w, out);
    }
  }
}

LayerUse Lowering::use(int layer, TaskList& out) {
  if (layer < 0 || layer >= layout_.layer_count()) throw MisuseError("no layer " + std::to_string(layer));
  position_ = layer;
  if (direction_ == Direction::backward) state_of(layer).used_in_backward = true;
  const std::vector<int>& needed = state_of(layer).touched;
  // Buffers already valid are held first, so that loading one layer cannot push out another of this use.
  const auto hold_valid = [&](int by) {
    for (const int l : needed) {
      const int b = state_of(l).weight_buffer;
      if (b >= 0) weight_buffers_[static_cast<std::size_t>(b)].holders += by;
    }
  };
  hold_valid(1);
  LayerUse use;
  before_.clear();
  for (const int l : needed) {
    const LayerState& state = state_of(l);
    if (state.stale) gather_resident(l, out);
    if (plan_.layers[static_cast<std::size_t>(l)].resident) {
      append(before_, state.weight_writers);
      use.weights.add({l, -1});
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
    use.weights.add({l, b});
  }
  use.id = emit(out, TaskKind::layer_use, Lane::caller, priority_fetch, layer).id;
  out.depends_on(before_);
  for (const WeightPlace& place : use.weights) {
    if (place.buffer >= 0) {
      weight_buffers_[static_cast<std::size_t>(place.buffer)].users.push_back(use.id);
    } else {
      state_of(place.layer).uses.push_back(use.id);
    }
  }
  ++open_visits_;
  if (direction_ == Direction::forward && layer == layout_.layer_count() - 1) direction_ = Direction::backward;
  return use;
}

void Lowering::release(const LayerUse& use) {
  --open_visits_;
  for (const WeightPlace& place : use.weights) {
    if (place.buffer >= 0) --weight_buffers_[static_cast<std::size_t>(place.buffer)].holders;
  }
}

void Lowering::prefetch(TaskList& out) {
  if (direction_ == Direction::none) return;
  prefetch_resident(out);
  const int last = layout_.layer_count() - 1;
  const int step = direction_ == Direction::backward ? -1 : 1;
  int missing_budget = weight_buffer_count();
  for (int l = position_ + step; l >= 0 && l <= last && missing_budget > 0; l += step) {
    if (direction_ == Direction::backward && !state_of(l).needed_in_backward) continue;
    for (const int w : state_of(l).touched) {
      if (plan_.layers[static_cast<std::size_t>(w)].resident) continue;
      if (state_of(w).weight_buffer >= 0) continue;
      --missing_budget;
      acquire_weight_buffer(w, true, out);
    }
  }
}

}  // namespace tandem
