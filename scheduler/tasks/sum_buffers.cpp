#include "scheduler/tasks/sum_buffers.hpp"

#include <algorithm>
#include <array>

#include "core/base/error.hpp"
#include "scheduler/plan/rank_slice.hpp"

namespace tandem {

SumBuffers::SumBuffers(LoweringState& state) : state_(state) {
  for (int c = 0; c < static_cast<int>(state.plan.size_classes.size()); ++c) {
    Buffer buffer;
    buffer.size_class = c;
    const int count = at(state.plan.size_classes, c).sum_buffers;
    buffers_.insert(buffers_.end(), static_cast<std::size_t>(count), buffer);
  }
}

int SumBuffers::buffer_of(LayerIndex layer) {
  const int size_class = state_.placement(layer).size_class;
  int free = -1;
  for (int b = 0; b < count(); ++b) {
    const Buffer& buffer = at(buffers_, b);
    if (buffer.layer == layer) return b;
    if (buffer.layer.none() && buffer.size_class == size_class) free = b;
  }
  if (free < 0) {
    throw MisuseError("no buffer is free for the sum of the gradients of layer " + state_.layer(layer).name);
  }
  at(buffers_, free).layer = layer;
  return free;
}

TaskId SumBuffers::add(Task& piece, TaskList& out) {
  piece.sum = buffer_of(piece.layer);
  Users& users = at(buffers_, piece.sum).users;
  const TaskId sum = state_.emit_like(out, piece, TaskKind::sum_gradient, Lane::device).id;
  // Positions in the buffer, at whose beginning a rank's slice of a layer lies.
  const std::int64_t slice = slice_of(state_.layer(piece.layer), state_.plan.rank).trained.begin;
  const RangeUse use{piece.begin - slice, piece.end - slice, sum};
  // Sorted, apart from each other; mostly it is the same piece of the micro-batch before.
  const auto first = std::upper_bound(users.begin(), users.end(), use.begin,
                                      [](std::int64_t begin, const RangeUse& other) { return begin < other.end; });
  auto last = first;
  for (; last != users.end() && last->begin < use.end; ++last) out.depends_on(last->task);
  replace(users, first, last, use);
  return sum;
}

/// `use` instead of [first, last), which it overlaps: of another layer, whose pieces lie otherwise, they may begin
/// before it and end behind it.
void SumBuffers::replace(Users& users, Users::iterator first, Users::iterator last, const RangeUse& use) {
  if (last - first == 1 && first->begin == use.begin && first->end == use.end) {
    *first = use;
    return;
  }
  std::array<RangeUse, 3> parts;
  std::size_t count = 0;
  if (first != last && first->begin < use.begin) parts[count++] = {first->begin, use.begin, first->task};
  parts[count++] = use;
  if (first != last && (last - 1)->end > use.end) parts[count++] = {use.end, (last - 1)->end, (last - 1)->task};
  const auto at_place = users.erase(first, last);
  users.insert(at_place, parts.begin(), parts.begin() + static_cast<std::ptrdiff_t>(count));
}

void SumBuffers::release(LayerIndex layer) noexcept {
  for (Buffer& buffer : buffers_) {
    if (buffer.layer == layer) buffer.layer = {};
  }
}

void SumBuffers::release_all() noexcept {
  for (Buffer& buffer : buffers_) buffer.layer = {};
}

void SumBuffers::forget_before(TaskId id) {
  for (Buffer& buffer : buffers_) {
    std::erase_if(buffer.users, [id](const RangeUse& use) { return use.task < id; });
  }
}

}  // namespace tandem
