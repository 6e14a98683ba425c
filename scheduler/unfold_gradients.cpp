// The way of gradients: from the buffers that the caller fills to where their update finds them.
#include <algorithm>

#include "core/error.hpp"
#include "core/update_kernels.hpp"
#include "scheduler/unfold.hpp"
#include "scheduler/unfold_common.hpp"

namespace tandem {

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

}  // namespace tandem
