#include "models/transformer/products.hpp"

#include <algorithm>

#include "models/transformer/block.hpp"

namespace tandem {
namespace {

bool is_multiple(std::int64_t n) { return n % fp8_multiple == 0; }

/// Whether both sizes of a matrix are.
bool are_multiples(const TensorView& x) { return is_multiple(x.shape[0]) && is_multiple(x.shape[1]); }

/// Layers of a block that take one input of `inputs` channels, by the channels of their outputs.
struct LinearGroup {
  std::int64_t inputs = 0;
  std::vector<std::int64_t> outputs;
};

std::vector<LinearGroup> linear_groups(const ModelConfig& c) {
  if (c.family == Family::gpt2) {
    return {{c.width, {3 * c.width}}, {c.width, {c.width}}, {c.width, {c.ffn}}, {c.ffn, {c.width}}};
  }
  const std::int64_t query = c.heads * c.head_dim, key = c.kv_heads * c.head_dim;
  std::vector<LinearGroup> groups{{c.width, {query, key, key}}, {query, {c.width}}};
  if (c.experts == 0) {
    groups.push_back({c.width, {c.ffn, c.ffn}});
    groups.push_back({c.ffn, {c.width}});
  }
  return groups;
}

/// Whether a product of those sizes has eight-bit factors.
bool takes(const Fp8Buffers* buffers, const TensorView& x, const TensorView& w) {
  return buffers != nullptr && is_multiple(x.shape[0]) && is_multiple(w.shape[0]) && is_multiple(w.shape[1]);
}

Fp8Matrix quantized(Ops& ops, StreamView stream, const MeasuredView& x, void* memory, Fp8Sums sums,
                    Fp8Format format = Fp8Format::e4m3) {
  const Fp8Matrix m{memory, x.values.shape[0], x.values.shape[1], sums, format};
  ops.quantize(x, m, stream);
  return m;
}

/// x, or nothing where its sizes do not allow it.
template <class Call>
Fp8Matrix quantized_input(const Call& call, const MeasuredView& x, Fp8Sums sums) {
  if (call.fp8 == nullptr || !are_multiples(x.values)) return {};
  return quantized(call.ops, call.stream, x, call.fp8->input, sums);
}

template <class Call>
Fp8Matrix quantized_weight(const Call& call, const TensorView& w, Fp8Sums sums) {
  return quantized(call.ops, call.stream, w, call.fp8->weight, sums);
}

}  // namespace

Fp8Sizes fp8_sizes(const ModelConfig& config, const RunShape& shape, const OpsRules& ops) {
  Fp8Sizes sizes;
  const std::int64_t tokens = shape.batch * shape.sequence;
  if (!shape.fp8 || !is_multiple(tokens)) return sizes;
  sizes.magnitude = ops.magnitude_bytes();
  const auto grow = [&](std::size_t& size, std::int64_t rows, std::int64_t columns, Fp8Sums sums) {
    if (is_multiple(rows) && is_multiple(columns)) size = std::max(size, ops.fp8_bytes(rows, columns, sums));
  };
  for (const LinearGroup& group : linear_groups(config)) {
    grow(sizes.input, tokens, group.inputs, Fp8Sums::columns);
    for (std::size_t i = 0; i < group.outputs.size(); ++i) {
      grow(sizes.weight, group.outputs[i], group.inputs, Fp8Sums::columns);
      if (shape.training) grow(sizes.gradients[i], tokens, group.outputs[i], Fp8Sums::both);
    }
  }
  return sizes;
}

namespace {

void* take_bytes(Carver& carver, std::size_t bytes) {
  return carver.take(DType::f32, {static_cast<std::int64_t>(align_up(bytes) / sizeof(float))}).data;
}

}  // namespace

std::optional<Fp8Buffers> take_fp8(Carver& carver, const Fp8Sizes& sizes, const RunShape& shape) {
  if (sizes.weight == 0) return std::nullopt;
  Fp8Buffers buffers{
      .how = *shape.fp8, .input = take_bytes(carver, sizes.input), .weight = take_bytes(carver, sizes.weight)};
  for (std::size_t i = 0; i < sizes.gradients.size(); ++i) {
    buffers.gradients[i] = take_bytes(carver, sizes.gradients[i]);
  }
  if (!shape.training) return buffers;
  for (void*& magnitude : buffers.gradient_magnitudes) magnitude = take_bytes(carver, sizes.magnitude);
  return buffers;
}

void take_magnitudes(Carver& carver, const Fp8Sizes& sizes, std::optional<Fp8Buffers>& buffers) {
  if (!buffers) return;
  InputMagnitudes& of = buffers->inputs.emplace_back();
  for (void** magnitude : {&of.attention, &of.output, &of.mlp, &of.down}) {
    *magnitude = take_bytes(carver, sizes.magnitude);
  }
}

InputMagnitudes input_magnitudes(const Fp8Buffers* buffers, std::size_t slot) {
  return buffers == nullptr ? InputMagnitudes{} : buffers->inputs.at(slot);
}

void* gradient_magnitude(const Fp8Buffers* buffers, std::size_t place) {
  return buffers == nullptr ? nullptr : buffers->gradient_magnitudes.at(place);
}

MeasuredView measured(const BlockForward& call, TensorView x, void* magnitude) {
  if (magnitude == nullptr || !are_multiples(x)) return x;
  const MeasuredView view(x, magnitude);
  call.ops.measure(view, call.stream);
  return view;
}

LinearInput linear_input(const BlockForward& call, MeasuredView x) {
  return {x.values, quantized_input(call, x, Fp8Sums::columns)};
}
LinearInput linear_input(const BlockBackward& call, MeasuredView x, bool wanted) {
  return {x.values, wanted ? quantized_input(call, x, Fp8Sums::rows) : Fp8Matrix{}};
}

namespace {

/// y = residual + (x w^T + bias) of eight-bit factors, where their sizes allow it.
bool fp8_linear(const BlockForward& call, const LinearInput& x, TensorView w, TensorView bias, TensorView residual,
                TensorView y) {
  if (x.quantized.data == nullptr || !takes(call.fp8, x.values, w)) return false;
  const Fp8Matrix weight = quantized_weight(call, w, Fp8Sums::columns);
  call.ops.fp8_linear(x.quantized, weight, call.fp8->how.accumulation, bias, residual, y, call.stream);
  return true;
}

}  // namespace

void linear(const BlockForward& call, const LinearInput& x, TensorView w, TensorView bias, TensorView y) {
  if (!fp8_linear(call, x, w, bias, {}, y)) linear(call, x.values, w, bias, y);
}

void linear_add(const BlockForward& call, const LinearInput& x, TensorView w, TensorView bias, TensorView residual,
                TensorView y) {
  if (fp8_linear(call, x, w, bias, residual, y)) return;
  if (!call.few_rows()) return call.ops.linear_add(x.values, w, bias, residual, y, call.stream);
  call.ops.linear_rows(x.values, w, bias, y, call.stream);
  call.ops.add(residual, y, y, call.stream);
}

void linear_gelu(const BlockForward& call, const LinearInput& x, TensorView w, TensorView bias, TensorView up,
                 MeasuredView act) {
  if (fp8_linear(call, x, w, bias, {}, up)) return call.ops.gelu(up, act, call.stream);
  if (!call.few_rows()) {
    call.ops.linear_gelu(x.values, w, bias, up, act.values, call.stream);
    if (act.magnitude != nullptr) call.ops.measure(act, call.stream);
    return;
  }
  call.ops.linear_rows(x.values, w, bias, up, call.stream);
  call.ops.gelu(up, act, call.stream);
}

LinearGradient linear_gradient(const BlockBackward& call, MeasuredView dy, std::size_t place) {
  if (call.fp8 == nullptr || !are_multiples(dy.values)) return {dy.values, {}};
  return {dy.values,
          quantized(call.ops, call.stream, dy, call.fp8->gradients.at(place), Fp8Sums::both, call.fp8->how.gradients)};
}

void add_linear_gradients(const BlockBackward& call, const LinearGradient& dy, const LinearInput& x, TensorView dweight,
                          TensorView dbias) {
  if (dweight && dy.quantized.data != nullptr && x.quantized.data != nullptr) {
    call.ops.fp8_backward_weight(dy.quantized, x.quantized, call.fp8->how.accumulation, dweight, call.stream);
    dweight = {};
  }
  if (dweight || dbias) call.ops.linear_backward_weight(dy.values, x.values, dweight, dbias, call.stream);
}

void linear_backward_input(const BlockBackward& call, const LinearGradient& dy, TensorView w, TensorView dx,
                           bool accumulate) {
  if (dy.quantized.data == nullptr || !takes(call.fp8, dy.values, w)) {
    return call.ops.linear_backward_input(dy.values, w, dx, accumulate, call.stream);
  }
  const Fp8Matrix weight = quantized_weight(call, w, Fp8Sums::rows);
  call.ops.fp8_backward_input(dy.quantized, weight, call.fp8->how.accumulation, dx, accumulate, call.stream);
}

void linear_gelu_backward_input(const BlockBackward& call, const LinearGradient& dy, TensorView w, TensorView up,
                                MeasuredView dup) {
  if (dy.quantized.data == nullptr || !takes(call.fp8, dy.values, w)) {
    call.ops.linear_gelu_backward_input(dy.values, w, up, dup.values, call.stream);
    if (dup.magnitude != nullptr) call.ops.measure(dup, call.stream);
    return;
  }
  linear_backward_input(call, dy, w, dup.values, false);
  call.ops.gelu_backward(dup.values, up, dup, call.stream);
}

}  // namespace tandem
