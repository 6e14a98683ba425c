// The way of gradients: from the buffers that the caller fills to where their update finds them.
#include <algorithm>
#include <array>

#include "core/base/error.hpp"
#include "core/tensor/layout_quantum.hpp"
#include "scheduler/plan/rank_slice.hpp"
#include "scheduler/tasks/lowering.hpp"
#include "scheduler/tasks/lowering_common.hpp"

namespace tandem {

/// The buffer that holds it, -1: nobody has added to it yet.
int Lowering::open_gradient(int layer, int micro) const noexcept {
  for (int b = 0; b < gradient_buffer_count(); ++b) {
    const GradientBuffer& buffer = gradient_buffers_[static_cast<std::size_t>(b)];
    if (buffer.layer == layer && buffer.micro == micro) return b;
  }
  return -1;
}

int Lowering::acquire_gradient_buffer(int layer, int micro) {
  const int size_class = plan_.layers[static_cast<std::size_t>(layer)].size_class;
  int best = -1;
  for (int b = 0; b < gradient_buffer_count(); ++b) {
    const GradientBuffer& buffer = gradient_buffers_[static_cast<std::size_t>(b)];
    if (buffer.size_class != size_class || buffer.layer >= 0) continue;
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
  GradientBuffer& buffer = gradient_buffers_[static_cast<std::size_t>(best)];
  buffer.layer = layer;
  buffer.micro = micro;
  buffer.commits = 0;
  buffer.commit_tasks.clear();
  return best;
}

/// A layer's micro-batches come one after another, so that their sum has one order.
void Lowering::require_next_micro_batch(int layer) const {
  const LayerState& state = layers_[static_cast<std::size_t>(layer)];
  const std::string& name = layout_.layer(layer).name;
  if (state.asked > state.committed) {
    throw MisuseError("gradients of layer " + name + " of the micro-batch before are not committed");
  }
  if (plan_.sends_sums && layer_at_work_ >= 0 && layer_at_work_ != layer) {
    const LayerState& before = layers_[static_cast<std::size_t>(layer_at_work_)];
    if (before.committed < micro_batches_) {
      throw MisuseError("gradients of layer " + name + " before all micro-batches of layer " +
                            layout_.layer(layer_at_work_).name + " are committed",
                        "the plan adds them up on the device, a layer at a time");
    }
  }
  if (state.asked == micro_end_) {
    throw MisuseError("gradients of layer " + name + " are already committed in this micro-batch",
                      plan_.micro_batches_at_once > 1 ? "and in all that pass through the layers at once" : "");
  }
}

/// Opens a buffer for each layer whose parameters this one's gradients belong to, or takes the one that is open.
void Lowering::open_gradients(GradientUse& use) {
  for (const int l : state_of(use.layer).touched) {
    if (layout_.layer(l).state_elements == 0 || !plan_.adds_to(l, use.layer)) continue;
    if (use.gradients.empty()) require_next_micro_batch(use.layer);
    const int open = open_gradient(l, use.micro);
    const int b = open < 0 ? acquire_gradient_buffer(l, use.micro) : open;
    use.gradients.add({l, b, open < 0});
  }
}

GradientUse Lowering::gradients(int layer, TaskList& out) {
  if (layer < 0 || layer >= layout_.layer_count()) throw MisuseError("no layer " + std::to_string(layer));
  LayerState& state = state_of(layer);
  GradientUse use;
  use.layer = layer;
  use.micro = state.asked;
  try {
    open_gradients(use);
  } catch (const Error&) {
    // Nobody zeroes what stays open: whoever asks again would add to what was there.
    for (const GradientPlace& place : use.gradients) {
      if (place.fresh) gradient_buffers_[static_cast<std::size_t>(place.buffer)].layer = -1;
    }
    throw;
  }
  before_.clear();
  for (const GradientPlace& place : use.gradients) {
    const GradientBuffer& buffer = gradient_buffers_[static_cast<std::size_t>(place.buffer)];
    if (place.fresh) append(before_, buffer.users);
    // A second contributor adds to what the first has written.
    append(before_, buffer.commit_tasks);
  }
  use.id = emit(out, TaskKind::commit, Lane::caller, priority_gradient, layer).id;
  out.depends_on(before_);
  if (use.gradients.empty()) return use;
  ++state.asked;
  layer_at_work_ = layer;
  direction_ = Direction::backward;
  return use;
}

void Lowering::commit(const GradientUse& use, TaskList& out) {
  // A layer without state may be committed too, even behind the last one that counts.
  if (use.gradients.empty()) return;
  ++state_of(use.layer).committed;
  for (const GradientPlace& place : use.gradients) {
    GradientBuffer& buffer = gradient_buffers_[static_cast<std::size_t>(place.buffer)];
    buffer.commit_tasks.push_back(use.id);
    if (++buffer.commits < state_of(place.layer).contributors) continue;
    send_gradient(place.buffer, out);
    --gradients_left_;
    if (use.micro < micro_batches_ - 1) continue;
    complete_layers_.push_back({place.layer, norm_tasks_.size()});
    if (update_in_backward_) update_layer(place.layer, out);
  }
  if (gradients_left_ == 0 && micro_end_ < micro_batches_) open_micro_batches(micro_end_);
}

void Lowering::abandon(const GradientUse& use) {
  for (const GradientPlace& place : use.gradients) {
    GradientBuffer& buffer = gradient_buffers_[static_cast<std::size_t>(place.buffer)];
    buffer.users = {use.id};
    append(buffer.users, buffer.commit_tasks);
  }
}

bool Lowering::gradients_complete() const noexcept {
  return layers_to_commit_ == 0 || (gradients_left_ == 0 && micro_end_ == micro_batches_);
}

void Lowering::send_gradient(int index, TaskList& out) {
  GradientBuffer& buffer = gradient_buffers_[static_cast<std::size_t>(index)];
  buffer.users.clear();
  const int ranks = plan_.rank.count;
  const int receive_buffer = ranks > 1 ? all_to_all(index, out) : -1;
  // In one order for all: that of the micro-batches, and in each that of the ranks.
  for (int rank = 0; rank < ranks; ++rank) {
    const int number = buffer.micro * ranks + rank;
    Task piece;
    piece.priority = priority_gradient;
    piece.step = step_;
    piece.layer = buffer.layer;
    piece.buffer = index;
    piece.receive_buffer = rank == plan_.rank.index ? -1 : receive_buffer;
    piece.from_rank = rank;
    piece.first_micro = number == 0;
    piece.last_micro = number == gradients_of_step() - 1;
    send_part(piece, out);
  }
  for (SumBuffer& sum : sum_buffers_) {
    if (sum.layer == buffer.layer && buffer.micro == micro_batches_ - 1) sum.layer = -1;
  }
  buffer.layer = -1;
}

/// What other ranks have of this one's part of the gradient in a buffer, into one for that. All read this one, too.
int Lowering::all_to_all(int index, TaskList& out) {
  GradientBuffer& from = gradient_buffers_[static_cast<std::size_t>(index)];
  const Layer& layer = layout_.layer(from.layer);
  const int receive_buffer = acquire_receive_buffer(from.layer);
  ReceiveBuffer& to = receive_buffers_[static_cast<std::size_t>(receive_buffer)];
  Task& task = emit(out, TaskKind::all_to_all_gradient, Lane::peers, priority_gradient, from.layer);
  const ElementRange own = slice_of(layer, plan_.rank).trained;
  const std::size_t each = layer.gradient_offset(own.end) - layer.gradient_offset(own.begin);
  task.begin = own.begin;
  task.end = own.end;
  task.buffer = index;
  task.receive_buffer = receive_buffer;
  task.bytes = static_cast<std::uint64_t>(plan_.rank.count - 1) * each;
  out.depends_on(from.commit_tasks);
  out.depends_on(to.users);
  out.depends_on(to.filled_by);
  from.users.push_back(task.id);
  to.filled_by = {task.id};
  to.users.clear();
  return receive_buffer;
}

/// That which was filled longest ago.
int Lowering::acquire_receive_buffer(int layer) const {
  const int size_class = plan_.layers[static_cast<std::size_t>(layer)].size_class;
  const auto age = [](const ReceiveBuffer& buffer) { return buffer.filled_by.empty() ? no_task : buffer.filled_by[0]; };
  int best = -1;
  for (std::size_t b = 0; b < receive_buffers_.size(); ++b) {
    const ReceiveBuffer& buffer = receive_buffers_[b];
    if (buffer.size_class != size_class) continue;
    if (best < 0 || age(buffer) < age(receive_buffers_[static_cast<std::size_t>(best)])) best = static_cast<int>(b);
  }
  if (best < 0) throw MisuseError("no buffer for what other ranks send of layer " + layout_.layer(layer).name);
  return best;
}

/// One rank's gradient of one micro-batch: what this rank owns of it, to each subgroup.
void Lowering::send_part(Task piece, TaskList& out) {
  const LayerState& state = state_of(piece.layer);
  for (int s = state.first_subgroup; s < state.first_subgroup + state.subgroup_count; ++s) {
    // Whoever still uses the final gradient of the micro-batch or step before; it is not touched before it is due.
    std::vector<Use>& users = subgroups_[static_cast<std::size_t>(s)].gradient_users;
    const bool kept = plan_.subgroups[static_cast<std::size_t>(s)].gradient_on_device;
    if (kept || !plan_.sends_sums || piece.last_micro) {
      gradient_before_.swap(users);
      users.clear();
    }
    piece.subgroup = s;
    for_gradient_pieces(s, [&](std::int64_t begin, std::int64_t end) {
      piece.begin = begin;
      piece.end = end;
      piece.in_bf16 = begin >= layout_.layer(piece.layer).summed_elements;
      if (kept) {
        keep_piece(piece, out);
      } else {
        send_piece(piece, out);
      }
    });
  }
}

int Lowering::sum_buffer_of(int layer) {
  const int size_class = plan_.layers[static_cast<std::size_t>(layer)].size_class;
  int free = -1;
  for (int b = 0; b < sum_buffer_count(); ++b) {
    const SumBuffer& buffer = sum_buffers_[static_cast<std::size_t>(b)];
    if (buffer.layer == layer) return b;
    if (buffer.layer < 0 && buffer.size_class == size_class) free = b;
  }
  if (free < 0)
    throw MisuseError("no buffer is free for the sum of the gradients of layer " + layout_.layer(layer).name);
  sum_buffers_[static_cast<std::size_t>(free)].layer = layer;
  return free;
}

/// To the sum of the micro-batches before; the last one leaves it, rounded, in staging.
TaskId Lowering::add_piece(Task& piece, TaskList& out) {
  piece.sum = sum_buffer_of(piece.layer);
  SumBuffer& sum = sum_buffers_[static_cast<std::size_t>(piece.sum)];
  const TaskId add = emit_like(out, piece, TaskKind::sum_gradient, Lane::device).id;
  // Of the buffer: what a rank owns of a layer lies at its beginning.
  const std::int64_t slice = slice_of(layout_.layer(piece.layer), plan_.rank).trained.begin;
  const Use use{piece.begin - slice, piece.end - slice, add};
  // Sorted, apart from each other; mostly it is the same piece of the micro-batch before.
  const auto first = std::upper_bound(sum.users.begin(), sum.users.end(), use.begin,
                                      [](std::int64_t begin, const Use& other) { return begin < other.end; });
  auto last = first;
  for (; last != sum.users.end() && last->begin < use.end; ++last) out.depends_on(last->task);
  replace_uses(sum.users, first, last, use);
  return add;
}

/// `use` instead of [first, last), which it overlaps: of another layer, whose pieces lie otherwise, they may begin
/// before it and end behind it.
void Lowering::replace_uses(std::vector<Use>& users, std::vector<Use>::iterator first, std::vector<Use>::iterator last,
                            const Use& use) {
  if (last - first == 1 && first->begin == use.begin && first->end == use.end) {
    *first = use;
    return;
  }
  std::array<Use, 3> parts;
  std::size_t count = 0;
  if (first != last && first->begin < use.begin) parts[count++] = {first->begin, use.begin, first->task};
  parts[count++] = use;
  if (first != last && (last - 1)->end > use.end) parts[count++] = {use.end, (last - 1)->end, (last - 1)->task};
  const auto at = users.erase(first, last);
  users.insert(at, parts.begin(), parts.begin() + static_cast<std::ptrdiff_t>(count));
}

/// Into staging, rounded, alone or with the micro-batches before.
void Lowering::stage_piece(Task& piece, bool adds, TaskList& out) {
  const bool rounds = !piece.in_bf16 || piece.last_micro;
  if (rounds) piece.staging = take_staging();
  const TaskId staged = adds ? add_piece(piece, out) : emit_like(out, piece, TaskKind::round_gradient, Lane::device).id;
  out.depends_on(fillers_of(piece));
  users_of(piece).push_back(staged);
  if (!rounds) return;
  TaskId& user = staging_users_[static_cast<std::size_t>(piece.staging)];
  out.depends_on(user);
  user = staged;
}

/// To the host, where the final gradient is what `gradient_before_` uses: by way of staging, or as it is.
void Lowering::send_piece(Task piece, TaskList& out) {
  const bool adds = plan_.sends_sums && gradients_of_step() > 1;
  const bool staged = adds || !piece.in_bf16;
  if (staged) stage_piece(piece, adds, out);
  if (plan_.sends_sums) {
    if (!piece.last_micro) return;
    piece.first_micro = true;  // to the host it is the only one
  }

  Task& flush = emit_like(out, piece, TaskKind::flush_gradient, Lane::device_to_host);
  flush.bytes = static_cast<std::uint64_t>(flush.count()) * 2;
  const TaskId flushed = flush.id;
  if (staged) {
    TaskId& user = staging_users_[static_cast<std::size_t>(piece.staging)];
    out.depends_on(user);
    user = flushed;
  } else {
    out.depends_on(fillers_of(piece));
    users_of(piece).push_back(flushed);
  }
  depend_on_users(gradient_before_, piece.begin, piece.end, out);

  const TaskId accumulation = emit_like(out, piece, TaskKind::accumulate_gradient, Lane::cpu).id;
  out.depends_on(flushed);
  subgroups_[static_cast<std::size_t>(piece.subgroup)].gradient_users.push_back({piece.begin, piece.end, accumulation});
  if (piece.last_micro) norm_tasks_.push_back(accumulation);
}

/// Into the final gradient on the device, which `gradient_before_` uses.
void Lowering::keep_piece(const Task& piece, TaskList& out) {
  auto& users = subgroups_[static_cast<std::size_t>(piece.subgroup)].gradient_users;
  const TaskId keep = emit_like(out, piece, TaskKind::keep_gradient, Lane::device).id;
  out.depends_on(fillers_of(piece));
  depend_on_users(gradient_before_, piece.begin, piece.end, out);
  users_of(piece).push_back(keep);
  users.push_back({piece.begin, piece.end, keep});
  if (!piece.last_micro) return;
  Task& fetch = emit_like(out, piece, TaskKind::fetch_norm, Lane::device_to_host);
  fetch.bytes = static_cast<std::uint64_t>((fetch.count() + layout_quantum - 1) / layout_quantum) * sizeof(double);
  out.depends_on(keep);
  users.push_back({piece.begin, piece.end, fetch.id});
  norm_tasks_.push_back(fetch.id);
}

}  // namespace tandem
