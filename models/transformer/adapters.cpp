#include "models/transformer/adapters.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "models/transformer/name_stream.hpp"

namespace tandem {

Adapters::Adapters(const ModelConfig& config, const RunShape& shape)
    : lora_(config.lora), compute_(shape.compute), tokens_(shape.batch * shape.sequence) {
  if (!lora_) return;
  for (const LinearLayer& layer : linear_layers(config)) {
    if (!lora_->adapts_any(layer.module)) continue;
    const std::int64_t choices = layer.experts > 0 ? config.chosen_experts : 1;
    adapters_.push_back({layer.module, layer.module + std::string(lora_a), layer.module + std::string(lora_b),
                         tokens_ * choices, choices, layer.inputs});
  }
}

void Adapters::take_shared(Carver& carver, AdapterBuffers& b) const {
  if (!drops()) return;
  const auto widest = std::ranges::max(adapters_, {}, &Adapter::inputs);
  b.wide = carver.take(compute_, {tokens_, widest.inputs});
}

void Adapters::take(Carver& carver, AdapterBuffers& b) const {
  for (const Adapter& adapter : adapters_) b.down.push_back(carver.take(compute_, {adapter.rows, lora_->rank}));
}

AdapterBuffers Adapters::first_tokens(AdapterBuffers b, std::int64_t n) const {
  for (std::size_t i = 0; i < b.down.size(); ++i) b.down[i] = first_rows(b.down[i], n * adapters_[i].choices);
  return b;
}

Adapters::Use Adapters::use(std::int64_t block, std::string_view module, const AdapterBuffers& b) const {
  if (!has(block, module)) return {};
  const auto found = std::ranges::find(adapters_, module, &Adapter::module);
  return {&*found, b.down.at(static_cast<std::size_t>(found - adapters_.begin()))};
}

/// Each element of each micro-batch has a number of its own, in a stream of its own for each adapter of each block.
Dropout Adapters::dropout(std::int64_t block, const Adapter& adapter, std::uint64_t draw) const {
  const auto elements = static_cast<std::uint64_t>(tokens_ * adapter.inputs);
  return {.rate = static_cast<float>(lora_->dropout),
          .seed = lora_->seed,
          .stream = name_stream(fmt::format("block.{}.{}", block, adapter.module)),
          .first = draw * elements};
}

void Adapters::scale(Ops& ops, TensorView down, StreamView stream) const {
  ops.add_scaled(down, static_cast<float>(lora_->scale()), {}, down, stream);
}

namespace {

TensorView as_wide(TensorView wide, TensorView like) { return TensorView{wide.data, wide.dtype, like.shape}; }

/// y += down B, with B as it lies, (r, O). Of few rows each by itself, so that its bits do not depend on the others.
void add_up(const BlockForward& call, TensorView down, TensorView up, TensorView y) {
  if (!call.few_rows()) return call.ops.linear_backward_input(down, up, y, true, call.stream);
  for (std::int64_t i = 0; i < y.shape[0]; ++i) {
    call.ops.linear_backward_input(down.rows(i, i + 1), up, y.rows(i, i + 1), true, call.stream);
  }
}

}  // namespace

void Adapters::forward(const BlockForward& call, std::string_view module, TensorView x, TensorView y,
                       const AdapterBuffers& b) const {
  const Use found = use(call.layer, module, b);
  if (!found || call.of_reference) return;
  if (drops() && call.draw != nullptr) {
    const TensorView dropped = as_wide(b.wide, x);
    call.ops.dropout(x, dropout(call.layer, *found.adapter, *call.draw), dropped, false, call.stream);
    x = dropped;
  }
  linear(call, x, call.weights[found.adapter->a], {}, found.down);
  scale(call.ops, found.down, call.stream);
  if (y) add_up(call, found.down, call.weights[found.adapter->b], y);
}

void Adapters::parameter_gradients(const BlockBackward& call, std::string_view module, TensorView dy, TensorView x,
                                   const AdapterBuffers& b) const {
  const Use found = use(call.layer, module, b);
  if (!found) return;
  add_linear_gradients(call, found.down, dy, call.gradients[found.adapter->b]);
  call.ops.linear(dy, call.weights[found.adapter->b], {}, found.down, call.stream);
  scale(call.ops, found.down, call.stream);
  if (drops()) {
    const TensorView dropped = as_wide(b.wide, x);
    call.ops.dropout(x, dropout(call.layer, *found.adapter, call.draw), dropped, false, call.stream);
    x = dropped;
  }
  add_linear_gradients(call, found.down, x, call.gradients[found.adapter->a]);
}

void Adapters::input_gradient(const BlockBackward& call, std::string_view module, TensorView dx,
                              const AdapterBuffers& b) const {
  const Use found = use(call.layer, module, b);
  if (!found) return;
  const TensorView a = call.weights[found.adapter->a];
  if (!drops()) return call.ops.linear_backward_input(found.down, a, dx, true, call.stream);
  const TensorView ddropped = as_wide(b.wide, dx);
  call.ops.linear_backward_input(found.down, a, ddropped, false, call.stream);
  call.ops.dropout(ddropped, dropout(call.layer, *found.adapter, call.draw), dx, true, call.stream);
}

void Adapters::expert_forward(const BlockForward& call, std::string_view module, RowValues x, const Routing& routing,
                              TensorView y, const AdapterBuffers& b) const {
  const Use found = use(call.layer, module, b);
  if (!found || call.of_reference) return;
  call.ops.expert_linear(x, call.weights[found.adapter->a], routing, found.down, call.stream);
  scale(call.ops, found.down, call.stream);
  if (y) call.ops.expert_backward_input({found.down}, call.weights[found.adapter->b], routing, y, true, call.stream);
}

void Adapters::expert_parameter_gradients(const BlockBackward& call, std::string_view module, RowValues dy, RowValues x,
                                          const Routing& routing, const AdapterBuffers& b) const {
  const Use found = use(call.layer, module, b);
  if (!found) return;
  if (const TensorView db = call.gradients[found.adapter->b]) {
    call.ops.expert_backward_weight({found.down}, dy, routing, db, call.stream);
  }
  call.ops.expert_linear(dy, call.weights[found.adapter->b], routing, found.down, call.stream);
  scale(call.ops, found.down, call.stream);
  if (const TensorView da = call.gradients[found.adapter->a]) {
    call.ops.expert_backward_weight({found.down}, x, routing, da, call.stream);
  }
}

void Adapters::expert_input_gradient(const BlockBackward& call, std::string_view module, const Routing& routing,
                                     TensorView dx, const AdapterBuffers& b) const {
  const Use found = use(call.layer, module, b);
  if (!found) return;
  call.ops.expert_backward_input({found.down}, call.weights[found.adapter->a], routing, dx, true, call.stream);
}

}  // namespace tandem
