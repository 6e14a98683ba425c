#include "scheduler/tasks/weight_ring.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <string>

#include "core/base/error.hpp"
#include "scheduler/plan/link_codes.hpp"
#include "scheduler/plan/rank_slice.hpp"

namespace tandem {

WeightRing::WeightRing(LoweringState& state)
    : state_(state), layers_(state.layout.layers().size()), code_buffers_(state.plan.code_buffers) {
  for (const LayerIndex l : layers_.indices()) {
    for (const LayerIndex needed : state.touched_by(l)) weights_of(needed).touchers.push_back(l);
  }
  for (int c = 0; c < static_cast<int>(state.plan.size_classes.size()); ++c) {
    Buffer buffer;
    buffer.size_class = c;
    const int count = at(state.plan.size_classes, c).weight_buffers;
    buffers_.insert(buffers_.end(), static_cast<std::size_t>(count), buffer);
  }
  invalidate_weights();
}

// -- where the caller is ---------------------------------------------------------------------------

void WeightRing::begin_step() {
  for (LayerWeights& layer : layers_) {
    if (layer.gradients_asked) layer.needed_in_backward = layer.used_in_backward;
    layer.used_in_backward = false;
    layer.gradients_asked = false;
  }
}

void WeightRing::enter(Direction direction) noexcept {
  direction_ = direction;
  position_ = {};
}

void WeightRing::enter_backward(LayerIndex layer) noexcept {
  weights_of(layer).gradients_asked = true;
  direction_ = Direction::backward;
}

int WeightRing::steps_until(LayerIndex layer) const noexcept {
  const LayerIndex last = last_layer();
  if (direction_ == Direction::backward) {
    const bool comes = layer < position_ && layers_[layer].needed_in_backward;
    return comes ? position_ - layer : position_.number() + layer.number() + 1;
  }
  if (layer > position_) return layer - position_;
  if (direction_ == Direction::forward) return (last - position_) + (last - layer) + 1;
  return last - position_ + layer.number() + 1;
}

int WeightRing::distance_to(LayerIndex layer) const noexcept {
  int nearest = std::numeric_limits<int>::max();
  for (const LayerIndex toucher : layers_[layer].touchers) nearest = std::min(nearest, steps_until(toucher));
  return nearest;
}

// -- fetches and gathers ---------------------------------------------------------------------------

int WeightRing::acquire(LayerIndex layer, bool only_idle, TaskList& out) {
  const int size_class = state_.placement(layer).size_class;
  int best = -1;
  int best_distance = -1;
  for (int b = 0; b < buffer_count(); ++b) {
    const Buffer& buffer = at(buffers_, b);
    if (buffer.size_class != size_class || buffer.holders > 0) continue;
    const int distance = buffer.layer.none() ? std::numeric_limits<int>::max() : distance_to(buffer.layer);
    if (distance > best_distance) {
      best = b;
      best_distance = distance;
    }
  }
  // A prefetch must not push out what is needed sooner than itself.
  if (only_idle && (best < 0 || best_distance <= distance_to(layer))) return -1;
  if (best < 0) {
    throw MisuseError("no weight buffer is free for layer " + state_.layer(layer).name,
                      "guards hold " + held_layers(size_class), "release a layer before fetching the next");
  }
  load(layer, best, out);
  return best;
}

/// Names of the layers in buffers of a size class that are held.
std::string WeightRing::held_layers(int size_class) const {
  std::vector<std::string> names;
  for (const Buffer& buffer : buffers_) {
    if (buffer.size_class == size_class && buffer.holders > 0) names.push_back(state_.layer(buffer.layer).name);
  }
  return fmt::format("{}", fmt::join(names, ", "));
}

void WeightRing::load(LayerIndex layer, int index, TaskList& out) {
  Buffer& buffer = at(buffers_, index);
  LayerWeights& weights = weights_of(layer);
  if (!buffer.layer.none()) weights_of(buffer.layer).buffer = -1;
  if (state_.placement(layer).in_codes && weights.codes_stale) encode(layer, priority_fetch, out);
  const TaskId fetched = fetch(layer, index, out);
  const int code_buffer = out.back().code_buffer;
  buffer.layer = layer;
  buffer.filled_by = fetched;
  buffer.users.clear();
  weights.buffer = index;
  // The next update of the host's copy must wait until this copy has been read.
  weights.uses.push_back(fetched);
  if (code_buffer >= 0) buffer.filled_by = decode(layer, index, code_buffer, fetched, out);
  if (state_.plan.rank.count == 1) return;
  buffer.filled_by = gather(layer, index, out);
  out.depends_on(fetched);
}

/// Emits the copy of a layer's weights, behind what used the buffer and what wrote the weights.
TaskId WeightRing::fetch(LayerIndex layer, int index, TaskList& out) {
  const Buffer& buffer = at(buffers_, index);
  const LayerWeights& weights = weights_of(layer);
  const Layer& of = state_.layer(layer);
  Task& fetch = state_.emit(out, TaskKind::fetch_weights, Lane::host_to_device, priority_fetch, layer);
  fetch.end = of.elements;
  fetch.buffer = index;
  fetch.bytes = fetched_bytes(of, state_.placement(layer), state_.plan.rank);
  const TaskId id = fetch.id;
  if (state_.placement(layer).in_codes) fetch.code_buffer = code_buffers_.take();
  const int code_buffer = fetch.code_buffer;
  out.depends_on(buffer.users);
  out.depends_on(buffer.filled_by);
  out.depends_on(weights.weight_writers);
  if (code_buffer < 0) return id;
  out.depends_on(weights.encoded_by);
  out.depends_on(code_buffers_.user(code_buffer));
  return id;
}

/// Emits the decoding of codes that were fetched, into the layer's buffer.
TaskId WeightRing::decode(LayerIndex layer, int buffer, int code_buffer, TaskId fetched, TaskList& out) {
  Task& decode = state_.emit(out, TaskKind::decode_weights, Lane::device, priority_fetch, layer);
  decode.end = state_.layer(layer).elements;
  decode.buffer = buffer;
  decode.code_buffer = code_buffer;
  decode.bytes = code_bytes(state_.layer(layer));
  code_buffers_.user(code_buffer) = decode.id;
  out.depends_on(fetched);
  return decode.id;
}

/// Emits the encoding of a layer's weights, behind what wrote them and what read its codes of before. The next update
/// must wait for it, as for other readers.
void WeightRing::encode(LayerIndex layer, int priority, TaskList& out) {
  LayerWeights& weights = weights_of(layer);
  Task& encode = state_.emit(out, TaskKind::encode_weights, Lane::cpu, priority, layer);
  encode.end = state_.layer(layer).elements;
  encode.bytes = code_bytes(state_.layer(layer));
  weights.encoded_by = encode.id;
  weights.codes_stale = false;
  out.depends_on(weights.weight_writers);
  out.depends_on(weights.uses);
  weights.uses.assign(1, weights.encoded_by);
}

/// Emits the gathering of a layer's other slices from the ranks that own them. The caller makes it wait for this rank's
/// own slice.
TaskId WeightRing::gather(LayerIndex layer, int buffer, TaskList& out) {
  const Layer& of = state_.layer(layer);
  Task& gather = state_.emit(out, TaskKind::gather_weights, Lane::peers, priority_fetch, layer);
  gather.end = of.elements;
  gather.buffer = buffer;
  gather.bytes = of.weight_offset(of.elements) - weight_bytes(of, slice_of(of, state_.plan.rank));
  return gather.id;
}

void WeightRing::gather_resident(LayerIndex layer, TaskList& out) {
  LayerWeights& weights = weights_of(layer);
  const TaskId gathered = gather(layer, -1, out);
  out.depends_on(weights.weight_writers);
  out.depends_on(weights.stale_readers);
  weights.stale = false;
  weights.stale_readers.clear();
  weights.weight_writers = {gathered};
  // Other ranks read this rank's slice until `gathered` is done.
  weights.uses.push_back(gathered);
}

/// A few of the layers that come next, where they stay on the device: what their ranks have updated.
void WeightRing::prefetch_resident(TaskList& out) {
  constexpr int ahead = 2;
  const int step = direction_ == Direction::backward ? -1 : 1;
  int left = ahead;
  for (LayerIndex l = position_ + step; is_layer(l) && left > 0; l += step, --left) {
    for (const LayerIndex w : state_.touched_by(l)) {
      if (weights_of(w).stale) gather_resident(w, out);
    }
  }
}

void WeightRing::prefetch(TaskList& out) {
  if (direction_ == Direction::none) return;
  prefetch_resident(out);
  const int step = direction_ == Direction::backward ? -1 : 1;
  int missing_budget = buffer_count();
  for (LayerIndex l = position_ + step; is_layer(l) && missing_budget > 0; l += step) {
    if (direction_ == Direction::backward && !weights_of(l).needed_in_backward) continue;
    for (const LayerIndex w : state_.touched_by(l)) {
      if (state_.placement(w).resident) continue;
      if (weights_of(w).buffer >= 0 || state_.speculated(w)) continue;
      --missing_budget;
      acquire(w, true, out);
    }
  }
}

// -- uses ------------------------------------------------------------------------------------------

/// Adds `by` to the holders of the buffers of these layers that are valid.
void WeightRing::hold_valid(const std::vector<LayerIndex>& layers, int by) {
  for (const LayerIndex l : layers) {
    const int b = weights_of(l).buffer;
    if (b >= 0) at(buffers_, b).holders += by;
  }
}

/// One of the layers that a use needs: held in its buffer, its writers added to `before_`.
WeightPlace WeightRing::place_for_use(LayerIndex layer, TaskList& out) {
  const LayerWeights& weights = weights_of(layer);
  if (weights.stale) gather_resident(layer, out);
  if (state_.placement(layer).resident) {
    append(before_, weights.weight_writers);
    return {layer, -1};
  }
  int b = weights.buffer;
  if (b < 0) {
    b = acquire(layer, false, out);
    ++at(buffers_, b).holders;
  }
  before_.push_back(at(buffers_, b).filled_by);
  return {layer, b};
}

LayerUse WeightRing::use(LayerIndex layer, TaskList& out) {
  if (!is_layer(layer)) throw MisuseError("no layer " + std::to_string(layer.number()));
  position_ = layer;
  if (direction_ == Direction::backward) weights_of(layer).used_in_backward = true;
  const std::vector<LayerIndex>& needed = state_.touched_by(layer);
  // Buffers already valid are held first, so that loading one layer cannot push out another of this use.
  hold_valid(needed, 1);
  LayerUse use;
  before_.clear();
  try {
    for (const LayerIndex l : needed) use.weights.add(place_for_use(l, out));
  } catch (...) {
    hold_valid(needed, -1);
    throw;
  }
  use.id = emit_use(layer, use.weights, out);
  if (direction_ == Direction::forward && layer == last_layer()) direction_ = Direction::backward;
  return use;
}

/// A use of a resident layer alone, of none that it borrows from, which leaves the caller where it is.
LayerUse WeightRing::use_resident(LayerIndex layer, TaskList& out) {
  before_.clear();
  LayerUse use;
  use.weights.add(place_for_use(layer, out));
  use.id = emit_use(layer, use.weights, out);
  return use;
}

/// Emits the task of a use, behind `before_`.
TaskId WeightRing::emit_use(LayerIndex layer, const Places<WeightPlace>& weights, TaskList& out) {
  const TaskId id = state_.emit(out, TaskKind::layer_use, Lane::caller, priority_fetch, layer).id;
  out.depends_on(before_);
  for (const WeightPlace& place : weights) {
    auto& readers = place.buffer >= 0 ? at(buffers_, place.buffer).users : weights_of(place.layer).uses;
    readers.push_back(id);
  }
  ++open_uses_;
  return id;
}

void WeightRing::release(const LayerUse& use) {
  --open_uses_;
  for (const WeightPlace& place : use.weights) {
    if (place.buffer >= 0) --at(buffers_, place.buffer).holders;
  }
}

/// Forgets what the buffers of a use hold, unless another use still does. Returns their places.
std::vector<WeightPlace> WeightRing::drop_idle(const LayerUse& use) {
  std::vector<WeightPlace> dropped;
  for (const WeightPlace& place : use.weights) {
    if (place.buffer < 0) continue;
    Buffer& buffer = at(buffers_, place.buffer);
    if (buffer.holders > 0 || buffer.layer != place.layer) continue;
    buffer.layer = {};
    weights_of(place.layer).buffer = -1;
    dropped.push_back(place);
  }
  return dropped;
}

// -- new weights -----------------------------------------------------------------------------------

void WeightRing::end_update(LayerIndex layer, TaskList& out) {
  LayerWeights& weights = weights_of(layer);
  weights.stale = state_.plan.rank.count > 1 && state_.placement(layer).resident;
  if (weights.stale) append(weights.stale_readers, weights.uses);
  if (state_.placement(layer).in_codes) {
    encode(layer, priority_update + layer.number(), out);
  } else {
    weights.uses.clear();  // uses from now on read new weights
  }
  if (weights.buffer < 0) return;
  at(buffers_, weights.buffer).layer = {};
  weights.buffer = -1;
}

void WeightRing::invalidate_weights() {
  if (open_uses_ > 0) throw MisuseError("weights were written while a layer is held");
  for (Buffer& buffer : buffers_) {
    if (!buffer.layer.none()) weights_of(buffer.layer).buffer = -1;
    buffer.layer = {};
  }
  for (const LayerIndex l : layers_.indices()) {
    weights_of(l).codes_stale = true;
    weights_of(l).stale = state_.plan.rank.count > 1 && state_.placement(l).resident;
  }
}

void WeightRing::forget_before(TaskId id) {
  for (Buffer& buffer : buffers_) erase_before(buffer.users, id);
  for (LayerWeights& layer : layers_) {
    erase_before(layer.uses, id);
    erase_before(layer.weight_writers, id);
    erase_before(layer.stale_readers, id);
  }
}

}  // namespace tandem
