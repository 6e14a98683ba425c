#include "train/runtime/module_ops.hpp"

#include "core/base/error.hpp"

namespace tandem {
namespace {

double as_double(std::int64_t value) { return static_cast<double>(value); }

/// FLOPs of a product of so many rows with w (O, I) or w (E, O, I), of which a row meets one expert's.
double product(std::int64_t rows, const TensorView& w) {
  const int last = w.shape.rank() - 1;
  return 2.0 * as_double(rows) * as_double(w.shape[last - 1]) * as_double(w.shape[last]);
}

double attention_flops(const AttentionShape& s) {
  const double in_sight = positions_seen(s.sequence, s.window) / positions_seen(s.sequence, 0);
  return 2.0 * as_double(s.batch * s.sequence) * as_double(s.sequence) * as_double(s.heads * s.head_dim) * in_sight;
}

/// Logits, and once more where a gradient is made slice by slice; the gradients that are asked for.
double head_flops(const HeadLoss& head) {
  const double products = 1.0 + (head.dx ? 1.0 : 0.0) + (head.dweight ? 1.0 : 0.0) + (head.in_slices() ? 1.0 : 0.0);
  const double of_tokens = head.token_rows ? product(head.x.shape[0], head.x) : 0.0;
  return products * product(head.x.shape[0], head.weight) + of_tokens;
}

/// "mlp.up_proj" of "mlp.up_proj.weight".
std::string_view module_of(std::string_view parameter) { return parameter.substr(0, parameter.rfind('.')); }

}  // namespace

ModuleKind kind_of_parameter(const Parameter& parameter) noexcept {
  if (is_adapter(parameter)) return ModuleKind::adapters;
  const std::string_view name = parameter.name;
  if (name == "tokens" || name == "positions") return ModuleKind::embedding;
  if (name == "lm_head") return ModuleKind::head;
  const bool norm = name.find("norm") != std::string_view::npos || name.starts_with("ln_");
  return norm ? ModuleKind::norms : kind_of_linear(module_of(name));
}

void ModuleOps::learn(const Layer& layer, int index, const WeightsGuard& weights) {
  layer_ = index;
  weights_.clear();
  if (!is_block(index)) return;
  for (const Parameter& p : layer.parameters) weights_[weights[p.name].data] = kind_of_parameter(p);
}

void ModuleOps::learn(const Layer& layer, int index, const GradientsGuard& gradients) {
  layer_ = index;
  gradients_.clear();
  if (!is_block(index)) return;
  for (const Parameter& p : layer.parameters) {
    if (const TensorView view = gradients[p.name]) gradients_[view.data] = kind_of_parameter(p);
  }
}

void ModuleOps::enter(ModuleKind kind, StreamView stream, double matmul_flops, double attention_flops_of_it) {
  clock_.begin(static_cast<StreamPart>(kind), stream);
  clock_.count(kind, matmul_flops, attention_flops_of_it);
  last_ = kind;
}

ModuleKind ModuleOps::of(const Kinds& kinds, const TensorView& view) {
  const auto found = kinds.find(view.data);
  if (found == kinds.end()) return matrix_;
  if (found->second != ModuleKind::adapters) matrix_ = found->second;
  return found->second;
}

/// Adapters scale what A made of x; a block's output is scaled as it is added, and its gradient before either branch.
ModuleKind ModuleOps::of_scaling(const TensorView& residual) const noexcept {
  if (layer_ == 0) return ModuleKind::embedding;
  if (layer_ == head_layer_) return ModuleKind::head;
  if (residual) return matrix_;
  if (last_ == ModuleKind::adapters) return ModuleKind::adapters;
  return last_ == ModuleKind::norms ? ModuleKind::output : mlp();
}

// -- linear layers ---------------------------------------------------------------------------------------

void ModuleOps::linear(TensorView x, TensorView w, TensorView bias, TensorView y, StreamView stream) {
  enter(of(weights_, w), stream, product(x.shape[0], w));
  inner_.linear(x, w, bias, y, stream);
}

void ModuleOps::linear_rows(TensorView x, TensorView w, TensorView bias, TensorView y, StreamView stream) {
  enter(of(weights_, w), stream, product(x.shape[0], w));
  inner_.linear_rows(x, w, bias, y, stream);
}

void ModuleOps::linear_backward_input(TensorView dy, TensorView w, TensorView dx, bool accumulate, StreamView stream) {
  enter(of(weights_, w), stream, product(dy.shape[0], w));
  inner_.linear_backward_input(dy, w, dx, accumulate, stream);
}

void ModuleOps::linear_backward_weight(TensorView dy, TensorView x, TensorView dw, TensorView dbias,
                                       StreamView stream) {
  enter(of(gradients_, dw ? dw : dbias), stream, dw ? product(dy.shape[0], dw) : 0.0);
  inner_.linear_backward_weight(dy, x, dw, dbias, stream);
}

void ModuleOps::linear_add(TensorView x, TensorView w, TensorView bias, TensorView residual, TensorView y,
                           StreamView stream) {
  enter(of(weights_, w), stream, product(x.shape[0], w));
  inner_.linear_add(x, w, bias, residual, y, stream);
}

void ModuleOps::linear_gelu(TensorView x, TensorView w, TensorView bias, TensorView up, TensorView act,
                            StreamView stream) {
  enter(of(weights_, w), stream, product(x.shape[0], w));
  inner_.linear_gelu(x, w, bias, up, act, stream);
}

void ModuleOps::linear_gelu_backward_input(TensorView dy, TensorView w, TensorView up, TensorView dup,
                                           StreamView stream) {
  enter(of(weights_, w), stream, product(dy.shape[0], w));
  inner_.linear_gelu_backward_input(dy, w, up, dup, stream);
}

/// Quantizing a weight begins its layer, whose products follow. An input or a gradient is taken for the module before.
void ModuleOps::quantize(MeasuredView x, const Fp8Matrix& to, StreamView stream) {
  if (weights_.contains(x.values.data)) enter(of(weights_, x.values), stream);
  inner_.quantize(x, to, stream);
}

void ModuleOps::measure(MeasuredView x, StreamView stream) { inner_.measure(x, stream); }

void ModuleOps::fp8_linear(const Fp8Matrix& x, const Fp8Matrix& w, Fp8Accumulation sums, TensorView bias,
                           TensorView residual, TensorView y, StreamView stream) {
  enter(matrix_, stream, 2.0 * as_double(x.rows) * as_double(w.rows) * as_double(w.columns));
  inner_.fp8_linear(x, w, sums, bias, residual, y, stream);
}

void ModuleOps::fp8_backward_input(const Fp8Matrix& dy, const Fp8Matrix& w, Fp8Accumulation sums, TensorView dx,
                                   bool accumulate, StreamView stream) {
  enter(matrix_, stream, 2.0 * as_double(dy.rows) * as_double(w.rows) * as_double(w.columns));
  inner_.fp8_backward_input(dy, w, sums, dx, accumulate, stream);
}

void ModuleOps::fp8_backward_weight(const Fp8Matrix& dy, const Fp8Matrix& x, Fp8Accumulation sums, TensorView dw,
                                    StreamView stream) {
  enter(of(gradients_, dw), stream, product(dy.rows, dw));
  inner_.fp8_backward_weight(dy, x, sums, dw, stream);
}

void ModuleOps::head_loss(const HeadLoss& head, StreamView stream) {
  enter(ModuleKind::head, stream, head_flops(head));
  inner_.head_loss(head, stream);
}

void ModuleOps::preference_loss(const PreferenceLoss& of_pairs, StreamView stream) {
  enter(ModuleKind::head, stream);
  inner_.preference_loss(of_pairs, stream);
}

// -- experts ---------------------------------------------------------------------------------------------

void ModuleOps::route(TensorView logits, bool normalized, const Routing& routing, StreamView stream) {
  enter(ModuleKind::router, stream);
  inner_.route(logits, normalized, routing, stream);
}

void ModuleOps::route_backward(TensorView drouting_weights, TensorView logits, bool normalized, const Routing& routing,
                               TensorView dlogits, StreamView stream) {
  enter(ModuleKind::router, stream);
  inner_.route_backward(drouting_weights, logits, normalized, routing, dlogits, stream);
}

void ModuleOps::expert_linear(RowValues x, TensorView w, const Routing& routing, TensorView y, StreamView stream) {
  enter(of(weights_, w), stream, product(routing.slots.count(), w));
  inner_.expert_linear(x, w, routing, y, stream);
}

void ModuleOps::expert_backward_input(RowValues dy, TensorView w, const Routing& routing, TensorView dx,
                                      bool accumulate, StreamView stream) {
  enter(of(weights_, w), stream, product(routing.slots.count(), w));
  inner_.expert_backward_input(dy, w, routing, dx, accumulate, stream);
}

void ModuleOps::expert_backward_weight(RowValues dy, RowValues x, const Routing& routing, TensorView dw,
                                       StreamView stream) {
  enter(of(gradients_, dw), stream, product(routing.slots.count(), dw));
  inner_.expert_backward_weight(dy, x, routing, dw, stream);
}

void ModuleOps::expert_swiglu(TensorView gate, TensorView up, const Routing& routing, TensorView y, StreamView stream) {
  enter(ModuleKind::experts, stream);
  inner_.expert_swiglu(gate, up, routing, y, stream);
}

void ModuleOps::expert_swiglu_backward(TensorView dy, TensorView gate, TensorView up, const Routing& routing,
                                       TensorView dgate, TensorView dup, TensorView drouting_weights,
                                       StreamView stream) {
  enter(ModuleKind::experts, stream);
  inner_.expert_swiglu_backward(dy, gate, up, routing, dgate, dup, drouting_weights, stream);
}

void ModuleOps::sum_rows(TensorView x, const Routing& routing, TensorView residual, TensorView y, StreamView stream) {
  enter(ModuleKind::experts, stream);
  inner_.sum_rows(x, routing, residual, y, stream);
}

// -- attention and norms ---------------------------------------------------------------------------------

void ModuleOps::attention(HeadsView q, HeadsView k, HeadsView v, TensorView out, TensorView lse,
                          const AttentionShape& shape, StreamView stream) {
  enter(ModuleKind::attention, stream, 0.0, attention_flops(shape));
  inner_.attention(q, k, v, out, lse, shape, stream);
}

void ModuleOps::attention_backward(TensorView dout, HeadsView q, HeadsView k, HeadsView v, TensorView out,
                                   TensorView lse, HeadsView dq, HeadsView dk, HeadsView dv,
                                   const AttentionShape& shape, StreamView stream) {
  enter(ModuleKind::attention, stream, 0.0, 2.5 * attention_flops(shape));
  inner_.attention_backward(dout, q, k, v, out, lse, dq, dk, dv, shape, stream);
}

void ModuleOps::store_keys_values(HeadsView k, HeadsView v, const KeyValueCache& cache, const CachedTokens& tokens,
                                  const AttentionShape& shape, StreamView stream) {
  enter(ModuleKind::attention, stream);
  inner_.store_keys_values(k, v, cache, tokens, shape, stream);
}

void ModuleOps::cached_attention(HeadsView q, const KeyValueCache& cache, const CachedTokens& tokens, TensorView out,
                                 const AttentionShape& shape, StreamView stream) {
  enter(ModuleKind::attention, stream);
  inner_.cached_attention(q, cache, tokens, out, shape, stream);
}

void ModuleOps::rope(TensorView x, TensorView table, RecordsView records, bool inverse, StreamView stream) {
  enter(ModuleKind::attention, stream);
  inner_.rope(x, table, records, inverse, stream);
}

void ModuleOps::layer_norm(TensorView x, TensorView weight, TensorView bias, MeasuredView y, TensorView mean,
                           TensorView rstd, float eps, StreamView stream) {
  enter(ModuleKind::norms, stream);
  inner_.layer_norm(x, weight, bias, y, mean, rstd, eps, stream);
}

void ModuleOps::layer_norm_backward(TensorView dy, TensorView x, TensorView weight, TensorView mean, TensorView rstd,
                                    TensorView dx, bool accumulate, TensorView dweight, TensorView dbias,
                                    StreamView stream) {
  enter(ModuleKind::norms, stream);
  inner_.layer_norm_backward(dy, x, weight, mean, rstd, dx, accumulate, dweight, dbias, stream);
}

void ModuleOps::rms_norm(TensorView x, NormWeight weight, MeasuredView y, TensorView rstd, float eps,
                         StreamView stream) {
  enter(ModuleKind::norms, stream);
  inner_.rms_norm(x, weight, y, rstd, eps, stream);
}

void ModuleOps::rms_norm_backward(TensorView dy, TensorView x, NormWeight weight, TensorView rstd, TensorView dx,
                                  bool accumulate, TensorView dweight, StreamView stream) {
  enter(ModuleKind::norms, stream);
  inner_.rms_norm_backward(dy, x, weight, rstd, dx, accumulate, dweight, stream);
}

// -- pointwise -------------------------------------------------------------------------------------------

void ModuleOps::gelu(TensorView x, MeasuredView y, StreamView stream) {
  enter(ModuleKind::mlp, stream);
  inner_.gelu(x, y, stream);
}

void ModuleOps::gelu_backward(TensorView dy, TensorView x, MeasuredView dx, StreamView stream) {
  enter(ModuleKind::mlp, stream);
  inner_.gelu_backward(dy, x, dx, stream);
}

void ModuleOps::swiglu(TensorView gate, TensorView up, MeasuredView y, StreamView stream) {
  enter(ModuleKind::mlp, stream);
  inner_.swiglu(gate, up, y, stream);
}

void ModuleOps::swiglu_backward(TensorView dy, TensorView gate, TensorView up, MeasuredView dgate, MeasuredView dup,
                                StreamView stream) {
  enter(ModuleKind::mlp, stream);
  inner_.swiglu_backward(dy, gate, up, dgate, dup, stream);
}

void ModuleOps::geglu(TensorView gate, TensorView up, MeasuredView y, StreamView stream) {
  enter(ModuleKind::mlp, stream);
  inner_.geglu(gate, up, y, stream);
}

void ModuleOps::geglu_backward(TensorView dy, TensorView gate, TensorView up, MeasuredView dgate, MeasuredView dup,
                               StreamView stream) {
  enter(ModuleKind::mlp, stream);
  inner_.geglu_backward(dy, gate, up, dgate, dup, stream);
}

void ModuleOps::add(TensorView a, TensorView b, TensorView y, StreamView stream) {
  enter(matrix_, stream);
  inner_.add(a, b, y, stream);
}

void ModuleOps::add_scaled(TensorView x, float factor, TensorView residual, TensorView y, StreamView stream) {
  enter(of_scaling(residual), stream);
  inner_.add_scaled(x, factor, residual, y, stream);
}

void ModuleOps::dropout(TensorView x, const Dropout& elements, TensorView y, bool accumulate, StreamView stream) {
  enter(ModuleKind::adapters, stream);
  inner_.dropout(x, elements, y, accumulate, stream);
}

void ModuleOps::embedding(TensorView tokens, TensorView table, TensorView positions, const TokenRows& rows,
                          TensorView out, StreamView stream) {
  enter(ModuleKind::embedding, stream);
  inner_.embedding(tokens, table, positions, rows, out, stream);
}

void ModuleOps::embedding_backward(TensorView dout, TensorView tokens, const TokenRows& rows, TensorView dtable,
                                   TensorView dpositions, TensorView token_rows, StreamView stream) {
  enter(ModuleKind::embedding, stream);
  inner_.embedding_backward(dout, tokens, rows, dtable, dpositions, token_rows, stream);
}

// -- probe -----------------------------------------------------------------------------------------------

void ModuleProbe::begin_forward(StreamView stream) {
  clock_.begin_pass(/*backward=*/false);
  clock_.begin(other_part, stream);
}

WeightsGuard ModuleProbe::fetch(int layer, StreamView stream) {
  clock_.begin(weights_part, stream);
  WeightsGuard weights = inner_.fetch(layer, stream);
  ops_.learn(layout_.layer(layer), layer, weights);
  return weights;
}

GradientsGuard ModuleProbe::gradients(int layer, StreamView stream) {
  clock_.begin_pass(/*backward=*/true);
  clock_.begin(gradients_part, stream);
  GradientsGuard gradients = inner_.gradients(layer, stream);
  ops_.learn(layout_.layer(layer), layer, gradients);
  return gradients;
}

void ModuleProbe::also_used(std::uint64_t, StreamView) { throw MisuseError("a module probe hands out no guards"); }
void ModuleProbe::commit(std::uint64_t, StreamView) { throw MisuseError("a module probe hands out no guards"); }

}  // namespace tandem
