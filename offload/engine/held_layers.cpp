#include "offload/engine/held_layers.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "core/base/error.hpp"
#include "core/ops/ops.hpp"

namespace tandem {
namespace {

/// Byte that makes NaN of any type of weight.
constexpr unsigned char of_nan = 0xFF;

}  // namespace

const std::string& HeldLayers::name_of(LayerIndex layer) const { return layer_at(parts_.layout, layer).name; }

template <class Held>
Held HeldLayers::take(std::vector<Held>& list, std::uint64_t ticket) {
  const auto it = std::find_if(list.begin(), list.end(), [&](const Held& h) { return h.ticket == ticket; });
  if (it == list.end()) throw MisuseError("a guard was given back twice, or belongs to another engine");
  Held held = std::move(*it);
  list.erase(it);
  return held;
}

LayerBases HeldLayers::bases_of(const LayerUse& use) const {
  LayerBases bases;
  for (const WeightPlace& place : use.weights) {
    bases.add(place.layer.number(), place.buffer >= 0 ? parts_.storage.weight_buffer(place.buffer)
                                                      : parts_.storage.resident_weights(place.layer));
  }
  return bases;
}

/// Throws MisuseError where the step's gradients have ended.
void HeldLayers::require_open(const char* call, LayerIndex layer) const {
  if (!pass_.gradients_ended) return;
  throw MisuseError(fmt::format("{} of layer {} after end_gradients", call, layer.number()), {},
                    "call update, skip or abort_step first");
}

WeightsGuard HeldLayers::fetch(LayerIndex layer, StreamView stream) {
  parts_.executor.require_good();
  if (pass_.kind == OpenPass::Kind::none) throw MisuseError("fetch outside a step and an evaluation");
  require_open("fetch", layer);
  parts_.device.require_own(stream);
  require_decodable(layer);
  Weights held;
  held.ticket = next_ticket_++;
  held.stream = SharedStream(stream);
  held.exceptions = std::uncaught_exceptions();
  held.use = parts_.lowering->use(layer, parts_.tasks);
  parts_.prefetch();
  parts_.submit();
  LayerBases bases = bases_of(held.use);
  if (layer_at(parts_.layout, layer).decoded_elements > 0) held.decoded = layer;
  if (!held.decoded.none()) bases.decoded = parts_.storage.decoded();
  weights_.push_back(held);
  WeightsGuard guard(&owner_, &parts_.layout, layer.number(), held.ticket, bases, stream);
  const bool updating = pass_.kind == OpenPass::Kind::step && parts_.updates.running();
  const std::uint32_t place = updating ? parts_.stalls.reach(stream) : 0;
  parts_.executor.begin_caller_task(held.use.id, stream, "fetching layer");
  if (updating) parts_.stalls.leave(place, stream);
  if (!held.decoded.none()) decode(layer, bases, stream);
  return guard;
}

/// Throws MisuseError where another guard has the buffer that the layer's weights are decoded into.
void HeldLayers::require_decodable(LayerIndex layer) const {
  if (!has_layer(parts_.layout, layer) || layer_at(parts_.layout, layer).decoded_elements == 0) return;
  const auto other = std::ranges::find_if(weights_, [](const Weights& held) { return !held.decoded.none(); });
  if (other == weights_.end()) return;
  throw MisuseError(fmt::format("weights of layer {} fetched while those of layer {} are held", name_of(layer),
                                name_of(other->decoded)),
                    "both are stored in another format, and there is one buffer to decode into",
                    "release one before fetching the other");
}

/// Decodes a layer's weights, behind the work of the buffer's last use.
void HeldLayers::decode(LayerIndex layer, const LayerBases& bases, StreamView stream) {
  if (decoded_free_) parts_.device.wait(stream, *decoded_free_);
  const Layer& of = layer_at(parts_.layout, layer);
  const auto* const stored = static_cast<const std::byte*>(bases.of(layer.number()));
  for (const Parameter& p : of.parameters) {
    if (!p.coded()) continue;
    const CodedWeight from{p.options.code, stored + of.weight_offset(p.offset),
                           reinterpret_cast<const float*>(stored + of.weight_offset(p.scales_offset))};
    std::byte* const to = parts_.storage.decoded() + static_cast<std::size_t>(p.decoded_offset) * sizeof(bf16);
    parts_.device.ops().decode(from, {to, DType::bf16, p.shape}, stream);
  }
}

/// Lets the next use decode, behind this one's work.
void HeldLayers::release_decoded(const Weights& held, StreamView stream) {
  if (held.decoded.none()) return;
  if (parts_.options.poison_released) {
    const std::int64_t values = layer_at(parts_.layout, held.decoded).decoded_elements;
    parts_.device.fill(parts_.storage.decoded(), of_nan, static_cast<std::size_t>(values) * sizeof(bf16), stream);
  }
  decoded_free_ = parts_.device.make_event();
  parts_.device.record(*decoded_free_, stream);
}

void HeldLayers::require_resident(LayerIndex layer) const {
  if (!has_layer(parts_.layout, layer)) throw MisuseError(fmt::format("no layer {}", layer.number()));
  if (placement_at(parts_.plan, layer).resident) return;
  throw MisuseError(fmt::format("weights of layer {} have no address of their own", name_of(layer)),
                    "the plan does not keep them on the device", "plan with OffloadOptions::resident_layers");
}

TensorView HeldLayers::resident_weights(const Parameter& parameter) const {
  const Parameter& p = parts_.layout.parameter(parameter.full_name);
  require_resident(layer_of(p));
  if (p.coded()) {
    throw MisuseError(fmt::format("weights of {} have no address of their own", p.full_name),
                      "they are stored in another format", "fetch its layer");
  }
  return {parts_.storage.resident_weight(layer_of(p), p.offset), p.options.weight, p.shape};
}

void HeldLayers::wait_for_weights(LayerIndex layer, StreamView stream) {
  parts_.executor.require_good();
  require_resident(layer);
  parts_.device.require_own(stream);
  const LayerUse use = parts_.lowering->use_resident(layer, parts_.tasks);
  parts_.submit();
  parts_.executor.begin_caller_task(use.id, stream, "waiting for the weights of layer");
  parts_.lowering->release(use);
  parts_.executor.finish_caller_task(use.id, stream);
}

bool HeldLayers::holds(std::uint64_t ticket) const noexcept {
  const auto is = [ticket](const auto& held) { return held.ticket == ticket; };
  return std::ranges::any_of(weights_, is) || std::ranges::any_of(gradients_, is);
}

void HeldLayers::empty_all() {
  while (!gradients_.empty()) abandon(gradients_.back().ticket);
  while (!weights_.empty()) release(weights_.back().ticket, weights_.back().stream.view);
}

void HeldLayers::also_used(std::uint64_t ticket, StreamView stream) {
  parts_.device.require_own(stream);
  for (Weights& held : weights_) {
    if (held.ticket != ticket) continue;
    parts_.executor.begin_caller_task(held.use.id, stream, "fetching layer");
    if (!held.decoded.none()) {
      const Event decoded = parts_.device.make_event();
      parts_.device.record(decoded, held.stream.view);
      parts_.device.wait(stream, decoded);
    }
    held.also.emplace_back(stream);
    return;
  }
  throw MisuseError("a guard was used after it was given back");
}

void HeldLayers::release(std::uint64_t ticket, StreamView stream) {
  const Weights held = take(weights_, ticket);
  const bool unwinding = std::uncaught_exceptions() > held.exceptions;  // the caller
  if (unwinding && pass_.kind == OpenPass::Kind::step) pass_.abandon(parts_, "an exception left a step");
  for (const SharedStream& other : held.also) {
    const Event joined = parts_.device.make_event();
    parts_.device.record(joined, other.view);
    parts_.device.wait(stream, joined);
  }
  release_decoded(held, stream);
  parts_.lowering->release(held.use);
  if (parts_.options.poison_released) poison(held.use, stream);
  parts_.executor.finish_caller_task(held.use.id, stream);
  if (!parts_.options.poison_released) parts_.prefetch();  // into the buffers that were poisoned
  parts_.submit();
}

/// Fills the buffers of a use with NaN, behind the caller's work, unless another guard holds them.
void HeldLayers::poison(const LayerUse& use, StreamView stream) {
  for (const WeightPlace& place : parts_.lowering->drop_idle(use)) {
    const Layer& layer = layer_at(parts_.layout, place.layer);
    parts_.device.fill(parts_.storage.weight_buffer(place.buffer), of_nan, layer.weight_offset(layer.elements), stream);
  }
}

/// Two layers that share parameters add to one buffer, which only one stream does in order.
void HeldLayers::require_one_stream(LayerIndex layer, StreamView stream) const {
  const std::vector<int>& borrows = layer_at(parts_.layout, layer).borrows;
  for (const Gradients& held : gradients_) {
    if (held.stream.view == stream) continue;
    for (const GradientPlace& place : held.use.gradients) {
      if (place.layer != layer && std::find(borrows.begin(), borrows.end(), place.layer.number()) == borrows.end())
        continue;
      throw MisuseError(fmt::format("gradients of layers '{}' and '{}', which share parameters, on two streams",
                                    layer_at(parts_.layout, held.use.layer).name, layer_at(parts_.layout, layer).name),
                        {}, "commit the one before asking for the other");
    }
  }
}

GradientsGuard HeldLayers::gradients(LayerIndex layer, StreamView stream) {
  parts_.executor.require_good();
  if (pass_.kind != OpenPass::Kind::step) throw MisuseError("gradients outside a step");
  require_open("gradients", layer);
  parts_.device.require_own(stream);
  if (has_layer(parts_.layout, layer)) require_one_stream(layer, stream);
  Gradients held;
  held.ticket = next_ticket_++;
  held.stream = SharedStream(stream);
  held.use = parts_.lowering->gradients(layer, parts_.tasks);
  parts_.submit();
  gradients_.push_back(held);
  LayerBases bases;
  for (const GradientPlace& place : held.use.gradients)
    bases.add(place.layer.number(), parts_.storage.gradient_buffer(place.buffer));
  GradientsGuard guard(&owner_, &parts_.layout, layer.number(), held.ticket, bases);
  parts_.executor.begin_caller_task(held.use.id, stream, "gradients of layer");
  for (const GradientPlace& place : held.use.gradients) {
    if (place.fresh) clear_gradients(place, stream);
  }
  return guard;
}

/// Clears the fp32 gradients, which callers add to, and the padding of those that they write. Where several uses add to
/// a buffer and some may be absent, perhaps nobody writes those: they are cleared, too.
void HeldLayers::clear_gradients(const GradientPlace& place, StreamView stream) {
  const Layer& layer = layer_at(parts_.layout, place.layer);
  std::byte* const buffer = parts_.storage.gradient_buffer(place.buffer);
  const auto clear = [&](std::int64_t begin, std::int64_t end) {
    const std::size_t first = layer.gradient_offset(begin), last = layer.gradient_offset(end);
    if (last > first) parts_.device.fill_zero(buffer + first, last - first, stream);
  };
  if (pass_.may_be_absent && !place.sole) return clear(0, layer.state_elements);
  clear(0, layer.summed_elements);
  for (const Parameter& p : layer.parameters) {
    if (p.tied() || !p.options.trainable || p.offset < layer.summed_elements) continue;
    clear(p.offset + p.count, p.offset + p.padded_count);
  }
}

/// Clears gradients that the caller was to write and has left out.
void HeldLayers::clear_left_out(const Gradients& held, StreamView stream) {
  for (const GradientPlace& place : held.use.gradients) {
    if (place.layer != held.use.layer || !place.sole) continue;
    const Layer& layer = layer_at(parts_.layout, place.layer);
    std::byte* const buffer = parts_.storage.gradient_buffer(place.buffer);
    for (const std::size_t index : held.left_out) {
      const Parameter& p = layer.parameters[index];
      if (p.tied() || p.offset < layer.summed_elements) continue;
      const std::size_t first = layer.gradient_offset(p.offset), last = layer.gradient_offset(p.offset + p.count);
      parts_.device.fill_zero(buffer + first, last - first, stream);
    }
  }
}

void HeldLayers::leave_out(std::uint64_t ticket, std::size_t parameter) {
  for (Gradients& held : gradients_) {
    if (held.ticket == ticket) held.left_out.push_back(parameter);
  }
}

void HeldLayers::commit(std::uint64_t ticket, StreamView stream) {
  parts_.executor.require_good();
  parts_.device.require_own(stream);
  const Gradients held = take(gradients_, ticket);
  clear_left_out(held, stream);
  present_.add(held.use.layer, held.left_out);
  parts_.lowering->commit(held.use, parts_.tasks);
  parts_.submit();
  parts_.executor.finish_caller_task(held.use.id, stream);
}

void HeldLayers::abandon(std::uint64_t ticket) {
  const Gradients held = take(gradients_, ticket);
  pass_.abandon(parts_, "gradients were not committed");
  parts_.lowering->abandon(held.use);
  parts_.executor.finish_caller_task(held.use.id, held.stream.view);
}

void HeldLayers::require_none(const char* what) const {
  require_no_gradients(what);
  if (weights_.empty()) return;
  throw MisuseError(fmt::format("{} while the weights of layer {} are held", what,
                                name_of(weights_.front().use.weights.begin()->layer)),
                    {}, "let the guard go first");
}

void HeldLayers::require_no_gradients(const char* what) const {
  if (gradients_.empty()) return;
  throw MisuseError(
      fmt::format("{} while the gradients of layer {} are held", what, name_of(gradients_.front().use.layer)), {},
      "commit them, or let the guard go, first");
}

}  // namespace tandem
