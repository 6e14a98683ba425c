#include "models/transformer/adapters.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "models/transformer/adapter_modules.hpp"
#include "models/transformer/name_stream.hpp"
#include "models/transformer/reference_adapters.hpp"

namespace tandem {

Adapters::Adapters(const ModelConfig& config, const RunShape& shape)
    : lora_(config.lora), compute_(shape.compute), training_(shape.training), tokens_(shape.batch * shape.sequence) {
  if (!lora_) return;
  for (const AdapterModule& module : adapter_modules(config)) {
    const std::int64_t rank = lora_->largest_rank(module.name);
    if (rank == 0) continue;
    const std::int64_t choices = module.experts() > 0 ? config.chosen_experts : 1;
    Adapter& adapter = adapters_.emplace_back(Adapter{.module = module.name,
                                                      .a = a_of(module),
                                                      .layers = {},
                                                      .b = {},
                                                      .rows = tokens_ * choices,
                                                      .choices = choices,
                                                      .inputs = module.inputs(),
                                                      .rank = rank});
    for (const LinearLayer& layer : module.layers) {
      adapter.layers.push_back(layer.module);
      adapter.b.push_back(b_of(layer));
    }
  }
}

void Adapters::take_shared(Carver& carver, AdapterBuffers& b) const {
  if (drops()) {
    const auto widest = std::ranges::max(adapters_, {}, &Adapter::inputs);
    b.wide = carver.take(compute_, {tokens_, widest.inputs});
  }
  std::int64_t largest = 0;
  for (const Adapter& adapter : adapters_) {
    if (adapter.layers.size() > 1) largest = std::max(largest, adapter.rows * adapter.rank);
  }
  if (!training_ || largest == 0) return;
  b.sum = carver.take(compute_, {largest});
  b.addend = carver.take(compute_, {largest});
}

void Adapters::take(Carver& carver, AdapterBuffers& b) const {
  for (const Adapter& adapter : adapters_) b.down.push_back(carver.take(compute_, {adapter.rows, adapter.rank}));
}

AdapterBuffers Adapters::first_tokens(AdapterBuffers b, std::int64_t n) const {
  for (std::size_t i = 0; i < b.down.size(); ++i) b.down[i] = first_rows(b.down[i], n * adapters_[i].choices);
  return b;
}

namespace {

TensorView as_shape(TensorView buffer, Shape shape) { return TensorView{buffer.data, buffer.dtype, shape}; }

}  // namespace

Adapters::Use Adapters::use(std::int64_t block, std::string_view layer, const AdapterBuffers& b) const {
  for (std::size_t i = 0; i < adapters_.size(); ++i) {
    const Adapter& adapter = adapters_[i];
    const auto found = std::ranges::find(adapter.layers, layer);
    if (found == adapter.layers.end()) continue;
    const LoraModule* const module = lora_->find(block, adapter.module);
    if (module == nullptr) continue;
    const TensorView down = b.down.at(i);
    return {&adapter, static_cast<std::size_t>(found - adapter.layers.begin()),
            as_shape(down, {down.shape[0], module->rank}), static_cast<float>(lora_->scale(*module))};
  }
  return {};
}

/// Each element of each micro-batch has a number of its own, in a stream of its own for each adapter of each block.
Dropout Adapters::dropout(std::int64_t block, const Adapter& adapter, std::uint64_t draw) const {
  const auto elements = static_cast<std::uint64_t>(tokens_ * adapter.inputs);
  return {.rate = static_cast<float>(lora_->dropout),
          .seed = lora_->seed,
          .stream = name_stream(fmt::format("block.{}.{}", block, adapter.module)),
          .first = draw * elements};
}

namespace {

void scale(Ops& ops, TensorView down, float factor, StreamView stream) {
  ops.add_scaled(down, factor, {}, down, stream);
}

/// Matrix of an adapter that a call computes with.
TensorView matrix(const BlockForward& call, const std::string& name) {
  return call.of_reference ? call.reference_adapters->matrix(call.layer, name) : call.weights[name];
}

/// y += down B, with B as it lies, (r, O). Of few rows each by itself, so that its bits do not depend on the others.
void add_up(const BlockForward& call, TensorView down, TensorView up, TensorView y) {
  if (!call.few_rows()) return call.ops.linear_backward_input(down, up, y, true, call.stream);
  for (std::int64_t i = 0; i < y.shape[0]; ++i) {
    call.ops.linear_backward_input(down.rows(i, i + 1), up, y.rows(i, i + 1), true, call.stream);
  }
}

}  // namespace

template <class Product>
bool Adapters::gather(const BlockBackward& call, const Use& use, const AdapterBuffers& b,
                      const Product& product) const {
  const TensorView& down = use.down;
  if (use.is_first()) {
    product(use.is_last() ? down : as_shape(b.sum, down.shape));
  } else {
    const TensorView sum = as_shape(b.sum, down.shape), addend = as_shape(b.addend, down.shape);
    product(addend);
    call.ops.add(sum, addend, use.is_last() ? down : sum, call.stream);
  }
  if (use.is_last()) scale(call.ops, down, use.scale, call.stream);
  return use.is_last();
}

void Adapters::forward(const BlockForward& call, std::string_view layer, TensorView x, TensorView y,
                       const AdapterBuffers& b) const {
  const Use found = use(call.layer, layer, b);
  if (!found || without(call)) return;
  if (found.is_first()) {
    if (drops() && call.draw != nullptr) {
      const TensorView dropped = as_shape(b.wide, x.shape);
      call.ops.dropout(x, dropout(call.layer, *found.adapter, *call.draw), dropped, false, call.stream);
      x = dropped;
    }
    linear(call, x, matrix(call, found.a()), {}, found.down);
    scale(call.ops, found.down, found.scale, call.stream);
  }
  if (y) add_up(call, found.down, matrix(call, found.b()), y);
}

void Adapters::parameter_gradients(const BlockBackward& call, std::string_view layer, TensorView dy, TensorView x,
                                   const AdapterBuffers& b) const {
  const Use found = use(call.layer, layer, b);
  if (!found) return;
  add_linear_gradients(call, found.down, dy, call.gradients[found.b()]);
  const auto product = [&](TensorView to) { call.ops.linear(dy, call.weights[found.b()], {}, to, call.stream); };
  if (!gather(call, found, b, product)) return;
  if (drops()) {
    const TensorView dropped = as_shape(b.wide, x.shape);
    call.ops.dropout(x, dropout(call.layer, *found.adapter, call.draw), dropped, false, call.stream);
    x = dropped;
  }
  add_linear_gradients(call, found.down, x, call.gradients[found.a()]);
}

void Adapters::input_gradient(const BlockBackward& call, std::string_view layer, TensorView dx,
                              const AdapterBuffers& b) const {
  const Use found = use(call.layer, layer, b);
  if (!found || !found.is_first()) return;
  const TensorView a = call.weights[found.a()];
  if (!drops()) return call.ops.linear_backward_input(found.down, a, dx, true, call.stream);
  const TensorView ddropped = as_shape(b.wide, dx.shape);
  call.ops.linear_backward_input(found.down, a, ddropped, false, call.stream);
  call.ops.dropout(ddropped, dropout(call.layer, *found.adapter, call.draw), dx, true, call.stream);
}

void Adapters::expert_forward(const BlockForward& call, std::string_view layer, RowValues x, const Routing& routing,
                              TensorView y, const AdapterBuffers& b) const {
  const Use found = use(call.layer, layer, b);
  if (!found || without(call)) return;
  if (found.is_first()) {
    call.ops.expert_linear(x, matrix(call, found.a()), routing, found.down, call.stream);
    scale(call.ops, found.down, found.scale, call.stream);
  }
  if (y) call.ops.expert_backward_input({found.down}, matrix(call, found.b()), routing, y, true, call.stream);
}

void Adapters::expert_parameter_gradients(const BlockBackward& call, std::string_view layer, RowValues dy, RowValues x,
                                          const Routing& routing, const AdapterBuffers& b) const {
  const Use found = use(call.layer, layer, b);
  if (!found) return;
  if (const TensorView db = call.gradients[found.b()]) {
    call.ops.expert_backward_weight({found.down}, dy, routing, db, call.stream);
  }
  const auto product = [&](TensorView to) {
    call.ops.expert_linear(dy, call.weights[found.b()], routing, to, call.stream);
  };
  if (!gather(call, found, b, product)) return;
  if (const TensorView da = call.gradients[found.a()]) {
    call.ops.expert_backward_weight({found.down}, x, routing, da, call.stream);
  }
}

void Adapters::expert_input_gradient(const BlockBackward& call, std::string_view layer, const Routing& routing,
                                     TensorView dx, const AdapterBuffers& b) const {
  const Use found = use(call.layer, layer, b);
  if (!found || !found.is_first()) return;
  call.ops.expert_backward_input({found.down}, call.weights[found.a()], routing, dx, true, call.stream);
}

}  // namespace tandem
