#include "scheduler/tasks/gradient_path.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>

#include "core/base/error.hpp"
#include "core/tensor/layout_quantum.hpp"
#include "scheduler/plan/rank_slice.hpp"

namespace tandem {

GradientPath::GradientPath(LoweringState& state) : state_(state), commits_(state), sums_(state) {
  for (int c = 0; c < static_cast<int>(state.plan.size_classes.size()); ++c) {
    const SizeClass& size = at(state.plan.size_classes, c);
    Buffer buffer;
    buffer.size_class = c;
    buffers_.insert(buffers_.end(), static_cast<std::size_t>(size.gradient_buffers), buffer);
    ReceiveBuffer receive_buffer;
    receive_buffer.size_class = c;
    receive_buffers_.insert(receive_buffers_.end(), static_cast<std::size_t>(size.receive_buffers), receive_buffer);
  }
}

std::int64_t GradientPath::buffer_elements(int buffer) const {
  return at(state_.plan.size_classes, buffers_.at(static_cast<std::size_t>(buffer)).size_class).gradient_elements;
}

void GradientPath::begin_step(const StepExtent& extent) {
  norm_tasks_.clear();
  complete_layers_.clear();
  for (Buffer& buffer : buffers_) {
    if (buffer.layer.none()) continue;  // else left by an abandoned step
    append(buffer.users, buffer.commit_tasks);
    buffer.layer = {};
  }
  sums_.release_all();
  commits_.begin_step(extent);
}

void GradientPath::begin_micro_batch(bool last, TaskList& out) {
  if (commits_.begun()) {
    commits_.require_next_micro_batch();
    close_buffers(out);
    commits_.begin_next_micro_batch();
  }
  if (last) commits_.close();
}

/// Sends what some layer has left open, of those that add to it.
void GradientPath::close_buffers(TaskList& out) {
  for (int b = 0; b < buffer_count(); ++b) {
    if (!at(buffers_, b).layer.none()) send_gradient(b, out);
  }
}

void GradientPath::end_step(Missing missing, TaskList& out) {
  commits_.end();
  close_buffers(out);
  for (LayerIndex l = state_.last_layer(); !l.none(); --l) {
    if (commits_.is_final(l) || state_.layer(l).state_elements == 0) continue;
    if (commits_.sent(l) > 0 || missing == Missing::zeros) finish(l, out);
  }
}

/// Makes a layer's gradient final where it was not known that no micro-batch would follow, or where there is none.
void GradientPath::finish(LayerIndex layer, TaskList& out) {
  Task piece;
  piece.priority = priority_gradient;
  piece.step = state_.step;
  piece.layer = layer;
  piece.first_micro = commits_.sent(layer) == 0;
  for (const SubgroupIndex s : state_.subgroups_of(layer)) {
    piece.subgroup = s;
    piece.in_fp32 = state_.subgroup(s).fp32_weights;
    finish_subgroup(piece, out);
  }
  complete(layer);
}

void GradientPath::finish_subgroup(Task piece, TaskList& out) {
  const Subgroup& group = state_.subgroup(piece.subgroup);
  const bool kept = group.gradient_on_device;
  std::vector<RangeUse>& users = state_.users(piece.subgroup).of_gradient;
  final_before_.swap(users);
  users.clear();
  for_pieces(state_.plan, group, kept, [&](std::int64_t begin, std::int64_t end) {
    piece.begin = begin;
    piece.end = end;
    const TaskId finished = state_.emit_like(out, piece, TaskKind::finish_gradient, kept ? Lane::device : Lane::cpu).id;
    depend_on_users(final_before_, begin, end, out);
    users.push_back({begin, end, finished});
    kept ? fetch_kept_norm(piece, finished, out) : norm_tasks_.push_back(finished);
  });
}

void GradientPath::forget_before(TaskId id) {
  for (Buffer& buffer : buffers_) erase_before(buffer.users, id);
  for (ReceiveBuffer& buffer : receive_buffers_) {
    erase_before(buffer.users, id);
    erase_before(buffer.filled_by, id);
  }
  sums_.forget_before(id);
}

// -- buffers that the caller fills -----------------------------------------------------------------

/// The buffer that holds it, -1: nobody has added to it yet.
int GradientPath::open_buffer(LayerIndex layer, int micro) const noexcept {
  for (int b = 0; b < buffer_count(); ++b) {
    const Buffer& buffer = at(buffers_, b);
    if (buffer.layer == layer && buffer.micro == micro) return b;
  }
  return -1;
}

int GradientPath::acquire_buffer(LayerIndex layer, int micro) {
  const int size_class = state_.placement(layer).size_class;
  int best = -1;
  for (int b = 0; b < buffer_count(); ++b) {
    const Buffer& buffer = at(buffers_, b);
    if (buffer.size_class != size_class || !buffer.layer.none()) continue;
    // The buffer whose last reader was emitted longest ago is the likeliest to be free.
    const auto age = [&](int index) {
      const std::vector<TaskId>& users = at(buffers_, index).users;
      return users.empty() ? no_task : users.back();
    };
    if (best < 0 || age(b) < age(best)) best = b;
  }
  if (best < 0) {
    throw MisuseError(
        "no gradient buffer is free for layer " + state_.layer(layer).name,
        "those of its size hold gradients of " + open_layers(size_class) + ", to which some layer has not added",
        "commit in backward order");
  }
  Buffer& buffer = at(buffers_, best);
  buffer.layer = layer;
  buffer.micro = micro;
  buffer.commits = 0;
  buffer.commit_tasks.clear();
  return best;
}

/// Names of the layers in open buffers of a size class.
std::string GradientPath::open_layers(int size_class) const {
  std::vector<std::string> names;
  for (const Buffer& buffer : buffers_) {
    if (buffer.size_class == size_class && !buffer.layer.none()) names.push_back(state_.layer(buffer.layer).name);
  }
  return fmt::format("{}", fmt::join(names, ", "));
}

/// Opens a buffer for each layer whose parameters this one's gradients belong to, or takes the one that is open.
void GradientPath::open_gradients(GradientUse& use) {
  for (const LayerIndex l : state_.touched_by(use.layer)) {
    if (state_.layer(l).state_elements == 0 || !state_.adds_to(l, use.layer)) continue;
    if (use.gradients.empty()) commits_.require_next(use.layer);
    const int open = open_buffer(l, use.micro);
    const int b = open < 0 ? acquire_buffer(l, use.micro) : open;
    use.gradients.add({l, b, open < 0, commits_.contributions(l) == 1});
  }
}

GradientUse GradientPath::gradients(LayerIndex layer, TaskList& out) {
  if (!has_layer(state_.layout, layer)) throw MisuseError("no layer " + std::to_string(layer.number()));
  GradientUse use;
  use.layer = layer;
  use.micro = commits_.next_micro_batch(layer);
  try {
    open_gradients(use);
  } catch (const Error&) {
    // Nobody zeroes what stays open: whoever asks again would add to what was there.
    for (const GradientPlace& place : use.gradients) {
      if (place.fresh) at(buffers_, place.buffer).layer = {};
    }
    throw;
  }
  before_.clear();
  for (const GradientPlace& place : use.gradients) {
    const Buffer& buffer = at(buffers_, place.buffer);
    if (place.fresh) append(before_, buffer.users);
    // A second contributor adds to what the first has written.
    append(before_, buffer.commit_tasks);
  }
  use.id = state_.emit(out, TaskKind::commit, Lane::caller, priority_gradient, layer).id;
  out.depends_on(before_);
  if (use.gradients.empty()) return use;
  commits_.ask(layer);
  return use;
}

void GradientPath::commit(const GradientUse& use, const GradientPlace& place, TaskList& out) {
  Buffer& buffer = at(buffers_, place.buffer);
  buffer.commit_tasks.push_back(use.id);
  if (++buffer.commits < commits_.contributions(place.layer)) return;
  send_gradient(place.buffer, out);
  commits_.count_gradient();
}

void GradientPath::abandon(const GradientUse& use) {
  for (const GradientPlace& place : use.gradients) {
    Buffer& buffer = at(buffers_, place.buffer);
    buffer.users = {use.id};
    append(buffer.users, buffer.commit_tasks);
  }
}

// -- from there to the final gradients -------------------------------------------------------------

void GradientPath::send_gradient(int index, TaskList& out) {
  Buffer& buffer = at(buffers_, index);
  buffer.users.clear();
  const Rank& own = state_.plan.rank;
  const int receive_buffer = own.count > 1 ? all_to_all(index, out) : -1;
  // In one order for all: that of the micro-batches, and in each that of the ranks.
  const bool first = commits_.send(buffer.layer), last = commits_.is_last(buffer.micro);
  for (int rank = 0; rank < own.count; ++rank) {
    Task piece;
    piece.priority = priority_gradient;
    piece.step = state_.step;
    piece.layer = buffer.layer;
    piece.buffer = index;
    piece.receive_buffer = rank == own.index ? -1 : receive_buffer;
    piece.from_rank = rank;
    piece.first_micro = first && rank == 0;
    piece.last_micro = last && rank == own.count - 1;
    send_part(piece, out);
  }
  if (last) {
    sums_.release(buffer.layer);
    complete(buffer.layer);
  }
  buffer.layer = {};
}

/// Emits the exchange of a gradient buffer: receives the other ranks' parts of this rank's slice in a receive buffer,
/// while all of them read their parts of this buffer. Returns the receive buffer.
int GradientPath::all_to_all(int index, TaskList& out) {
  Buffer& from = at(buffers_, index);
  const Layer& layer = state_.layer(from.layer);
  const int receive_buffer = acquire_receive_buffer(from.layer);
  ReceiveBuffer& to = at(receive_buffers_, receive_buffer);
  Task& task = state_.emit(out, TaskKind::all_to_all_gradient, Lane::peers, priority_gradient, from.layer);
  const ElementRange own = slice_of(layer, state_.plan.rank).trained;
  const std::size_t each = layer.gradient_offset(own.end) - layer.gradient_offset(own.begin);
  task.begin = own.begin;
  task.end = own.end;
  task.buffer = index;
  task.receive_buffer = receive_buffer;
  task.bytes = static_cast<std::uint64_t>(state_.plan.rank.count - 1) * each;
  out.depends_on(from.commit_tasks);
  out.depends_on(to.users);
  out.depends_on(to.filled_by);
  from.users.push_back(task.id);
  to.filled_by = {task.id};
  to.users.clear();
  return receive_buffer;
}

/// The receive buffer that was filled longest ago.
int GradientPath::acquire_receive_buffer(LayerIndex layer) const {
  const int size_class = state_.placement(layer).size_class;
  const auto age = [](const ReceiveBuffer& buffer) { return buffer.filled_by.empty() ? no_task : buffer.filled_by[0]; };
  int best = -1;
  for (int b = 0; b < static_cast<int>(receive_buffers_.size()); ++b) {
    const ReceiveBuffer& buffer = at(receive_buffers_, b);
    if (buffer.size_class != size_class) continue;
    if (best < 0 || age(buffer) < age(at(receive_buffers_, best))) best = b;
  }
  if (best < 0) throw MisuseError("no buffer for what other ranks send of layer " + state_.layer(layer).name);
  return best;
}

/// Tasks that make a piece's gradient complete in its buffer.
const std::vector<TaskId>& GradientPath::fillers_of(const Task& piece) const {
  return piece.receive_buffer < 0 ? at(buffers_, piece.buffer).commit_tasks
                                  : at(receive_buffers_, piece.receive_buffer).filled_by;
}

std::vector<TaskId>& GradientPath::users_of(const Task& piece) {
  return piece.receive_buffer < 0 ? at(buffers_, piece.buffer).users : at(receive_buffers_, piece.receive_buffer).users;
}

/// Calls body(begin, end) for each piece of a subgroup's gradient: in no piece does fp32 meet bf16.
template <class Body>
void GradientPath::for_gradient_pieces(SubgroupIndex subgroup, Body body) const {
  const Subgroup& group = state_.subgroup(subgroup);
  const std::int64_t border = state_.layer(layer_of(group)).summed_elements;
  for_pieces(state_.plan, group, group.gradient_on_device, [&](std::int64_t begin, std::int64_t end) {
    const bool crossed = begin < border && border < end;
    if (crossed) body(begin, border);
    body(crossed ? border : begin, end);
  });
}

/// One rank's gradient of one micro-batch: what this rank owns of it, to each subgroup.
void GradientPath::send_part(Task piece, TaskList& out) {
  for (const SubgroupIndex s : state_.subgroups_of(piece.layer)) {
    // Tasks that still use the final gradient of the micro-batch or step before; it is not touched before it is due.
    std::vector<RangeUse>& users = state_.users(s).of_gradient;
    const bool kept = state_.subgroup(s).gradient_on_device;
    if (kept || !state_.plan.sends_sums || piece.last_micro) {
      final_before_.swap(users);
      users.clear();
    }
    piece.subgroup = s;
    piece.in_fp32 = state_.subgroup(s).fp32_weights;
    norm_makers_.clear();
    for_gradient_pieces(s, [&](std::int64_t begin, std::int64_t end) {
      piece.begin = begin;
      piece.end = end;
      piece.in_bf16 = begin >= state_.layer(piece.layer).summed_elements;
      if (kept) {
        keep_piece(piece, out);
      } else {
        send_piece(piece, out);
      }
    });
    if (!kept && state_.plan.norms_on_device() && piece.last_micro) send_norm(piece, out);
  }
}

/// Into staging, rounded, alone or with the micro-batches before.
void GradientPath::stage_piece(Task& piece, bool adds, TaskList& out) {
  const bool rounds = (!piece.in_bf16 && !piece.in_fp32) || piece.last_micro;
  if (rounds) piece.staging = state_.staging.take();
  const TaskId staged =
      adds ? sums_.add(piece, out) : state_.emit_like(out, piece, TaskKind::round_gradient, Lane::device).id;
  out.depends_on(fillers_of(piece));
  users_of(piece).push_back(staged);
  if (!rounds) return;
  if (piece.last_micro) norm_makers_.push_back(staged);
  TaskId& user = state_.staging.user(piece.staging);
  out.depends_on(user);
  user = staged;
}

/// Sends a piece to the host, where `final_before_` are the users of the final gradient: by way of staging, or as it
/// is.
void GradientPath::send_piece(Task piece, TaskList& out) {
  const bool sends_sums = state_.plan.sends_sums;
  const bool adds = sends_sums && gradients_of_step() > 1;
  const bool staged = adds || !(piece.in_bf16 || piece.in_fp32);
  if (staged) stage_piece(piece, adds, out);
  if (sends_sums) {
    if (!piece.last_micro) return;
    piece.first_micro = true;  // to the host it is the only one
  }

  Task& flush = state_.emit_like(out, piece, TaskKind::flush_gradient, Lane::device_to_host);
  flush.bytes = static_cast<std::uint64_t>(flush.count()) * (piece.in_fp32 ? 4 : 2);
  const TaskId flushed = flush.id;
  if (staged) {
    TaskId& user = state_.staging.user(piece.staging);
    out.depends_on(user);
    user = flushed;
  } else {
    out.depends_on(fillers_of(piece));
    users_of(piece).push_back(flushed);
  }
  depend_on_users(final_before_, piece.begin, piece.end, out);
  if (state_.plan.norms_on_device()) {
    state_.users(piece.subgroup).of_gradient.push_back({piece.begin, piece.end, flushed});
    return;
  }
  const TaskId accumulation = state_.emit_like(out, piece, TaskKind::accumulate_gradient, Lane::cpu).id;
  out.depends_on(flushed);
  state_.users(piece.subgroup).of_gradient.push_back({piece.begin, piece.end, accumulation});
  if (piece.last_micro) norm_tasks_.push_back(accumulation);
}

/// Sends the norm blocks of a subgroup whose final gradient leaves the device: those of staged pieces are made with
/// them, the others here. `piece`: any of the subgroup.
void GradientPath::send_norm(Task piece, TaskList& out) {
  const Subgroup& group = state_.subgroup(piece.subgroup);
  const bool adds = gradients_of_step() > 1;
  const std::int64_t border = group.fp32_weights ? group.begin : state_.layer(piece.layer).summed_elements;
  piece.staging = -1;
  piece.begin = adds ? group.end : std::clamp(border, group.begin, group.end);
  piece.end = group.end;
  if (piece.begin < piece.end) {
    norm_makers_.push_back(state_.emit_like(out, piece, TaskKind::norm_gradient, Lane::device).id);
    out.depends_on(fillers_of(piece));
    users_of(piece).push_back(norm_makers_.back());
  }
  piece.begin = group.begin;
  Task& fetch = state_.emit_like(out, piece, TaskKind::fetch_norm, Lane::device_to_host);
  fetch.bytes = static_cast<std::uint64_t>(fetch.count() / layout_quantum) * sizeof(double);
  const TaskId fetched = fetch.id;
  out.depends_on(norm_makers_);
  // Updates that may be taken back read the blocks of the step before.
  if (group.speculates) depend_on_users(final_before_, group.begin, group.end, out);
  at(buffers_, piece.buffer).users.push_back(fetched);
  norm_tasks_.push_back(fetched);
}

/// Into the final gradient on the device, which `final_before_` uses.
void GradientPath::keep_piece(const Task& piece, TaskList& out) {
  std::vector<RangeUse>& users = state_.users(piece.subgroup).of_gradient;
  const TaskId keep = state_.emit_like(out, piece, TaskKind::keep_gradient, Lane::device).id;
  out.depends_on(fillers_of(piece));
  depend_on_users(final_before_, piece.begin, piece.end, out);
  users_of(piece).push_back(keep);
  users.push_back({piece.begin, piece.end, keep});
  if (piece.last_micro) fetch_kept_norm(piece, keep, out);
}

/// Fetches the norm blocks that `made` leaves on the device, of a piece of gradient that stays there.
void GradientPath::fetch_kept_norm(const Task& piece, TaskId made, TaskList& out) {
  Task& fetch = state_.emit_like(out, piece, TaskKind::fetch_norm, Lane::device_to_host);
  fetch.bytes = static_cast<std::uint64_t>((fetch.count() + layout_quantum - 1) / layout_quantum) * sizeof(double);
  const TaskId fetched = fetch.id;
  out.depends_on(made);
  state_.users(piece.subgroup).of_gradient.push_back({piece.begin, piece.end, fetched});
  norm_tasks_.push_back(fetched);
}

}  // namespace tandem
