#include "models/transformer/mlp.hpp"

namespace tandem {
namespace {

class DenseMlp final : public Mlp {
 public:
  DenseMlp(const ModelConfig& config, const RunShape& shape, const Adapters& adapters)
      : adapters_(adapters),
        tokens_(shape.batch * shape.sequence),
        ffn_(config.ffn),
        compute_(shape.compute),
        gelu_(config.gate == Gate::gelu),
        selective_(shape.selective),
        biased_(config.mlp_bias) {}

  void take_shared(Carver& carver, MlpBuffers& b) const override {
    if (selective_) b.act = activation(carver);
  }
  void take(Carver& carver, MlpBuffers& b) const override {
    b.gate = activation(carver);
    b.up = activation(carver);
    if (!selective_) b.act = activation(carver);
  }
  MlpBuffers first_tokens(MlpBuffers b, std::int64_t n) const override {
    for (TensorView* rows : {&b.gate, &b.up, &b.act}) *rows = first_rows(*rows, n);
    return b;
  }
  void forward(const BlockForward& call, MeasuredView of, const MlpBuffers& b, const AdapterBuffers& a) const override {
    const WeightsGuard& w = call.weights;
    const TensorView x = of.values;
    const LinearInput input = linear_input(call, of);
    linear(call, input, w["mlp.gate_proj.weight"], bias_of(biased_, w, "mlp.gate_proj.bias"), b.gate);
    adapters_.forward(call, "mlp.gate_proj", x, b.gate, a);
    linear(call, input, w["mlp.up_proj.weight"], bias_of(biased_, w, "mlp.up_proj.bias"), b.up);
    adapters_.forward(call, "mlp.up_proj", x, b.up, a);
    activate(call, b);
  }
  void activate(const BlockForward& call, const MlpBuffers& b) const override {
    if (gelu_) return call.ops.geglu(b.gate, b.up, measured_act(b), call.stream);
    call.ops.swiglu(b.gate, b.up, measured_act(b), call.stream);
  }
  void finish(const BlockForward& call, const MlpBuffers& b, const AdapterBuffers& a, TensorView residual,
              TensorView y) const override {
    const TensorView weight = call.weights["mlp.down_proj.weight"];
    const TensorView down_bias = bias_of(biased_, call.weights, "mlp.down_proj.bias");
    if (y && residual) linear_add(call, linear_input(call, measured_act(b)), weight, down_bias, residual, y);
    if (y && !residual) linear(call, linear_input(call, measured_act(b)), weight, down_bias, y);
    adapters_.forward(call, "mlp.down_proj", b.act, y, a);
  }
  void backward(const BlockBackward& call, TensorView dy, MeasuredView x, const MlpBuffers& b, const AdapterBuffers& a,
                TensorView dx, bool accumulate) const override;

 private:
  TensorView activation(Carver& carver) const { return carver.take(compute_, {tokens_, ffn_}); }
  static MeasuredView measured_act(const MlpBuffers& b) { return {b.act, b.act_magnitude}; }
  void input_gradients(const BlockBackward& call, MeasuredView of, const MlpBuffers& b, const AdapterBuffers& a,
                       TensorView dx, bool accumulate) const;

  const Adapters& adapters_;
  std::int64_t tokens_, ffn_;
  DType compute_;
  bool gelu_, selective_, biased_;
};

void DenseMlp::backward(const BlockBackward& call, TensorView dy, MeasuredView x, const MlpBuffers& b,
                        const AdapterBuffers& a, TensorView dx, bool accumulate) const {
  Ops& ops = call.ops;
  const StreamView s = call.stream;
  const WeightsGuard& w = call.weights;
  const GradientsGuard& g = call.gradients;
  const LinearGradient dresult = linear_gradient(call, dy);
  const TensorView ddown = g["mlp.down_proj.weight"];
  add_linear_gradients(call, dresult, linear_input(call, measured_act(b), static_cast<bool>(ddown)), ddown,
                       bias_of(biased_, g, "mlp.down_proj.bias"));
  adapters_.parameter_gradients(call, "mlp.down_proj", dy, b.act, a);
  const TensorView dact = b.act;
  const MeasuredView dgate(b.gate, gradient_magnitude(call.fp8, 0)), dup(b.up, gradient_magnitude(call.fp8, 1));
  linear_backward_input(call, dresult, w["mlp.down_proj.weight"], dact, false);
  adapters_.input_gradient(call, "mlp.down_proj", dact, a);
  if (gelu_) {
    ops.geglu_backward(dact, b.gate, b.up, dgate, dup, s);
  } else {
    ops.swiglu_backward(dact, b.gate, b.up, dgate, dup, s);
  }
  input_gradients(call, x, b, a, dx, accumulate);
}

/// Gradients of what gate and up project, from those of their results.
void DenseMlp::input_gradients(const BlockBackward& call, MeasuredView of, const MlpBuffers& b, const AdapterBuffers& a,
                               TensorView dx, bool accumulate) const {
  const TensorView x = of.values;
  const WeightsGuard& w = call.weights;
  const GradientsGuard& g = call.gradients;
  const TensorView gate_gradient = g["mlp.gate_proj.weight"], up_gradient = g["mlp.up_proj.weight"];
  const LinearGradient dgate = linear_gradient(call, {b.gate, gradient_magnitude(call.fp8, 0)}, 0),
                       dup = linear_gradient(call, {b.up, gradient_magnitude(call.fp8, 1)}, 1);
  const LinearInput input = linear_input(call, of, gate_gradient || up_gradient);
  add_linear_gradients(call, dgate, input, gate_gradient, bias_of(biased_, g, "mlp.gate_proj.bias"));
  add_linear_gradients(call, dup, input, up_gradient, bias_of(biased_, g, "mlp.up_proj.bias"));
  adapters_.parameter_gradients(call, "mlp.gate_proj", b.gate, x, a);
  adapters_.parameter_gradients(call, "mlp.up_proj", b.up, x, a);
  linear_backward_input(call, dgate, w["mlp.gate_proj.weight"], dx, accumulate);
  linear_backward_input(call, dup, w["mlp.up_proj.weight"], dx, true);
  adapters_.input_gradient(call, "mlp.gate_proj", dx, a);
  adapters_.input_gradient(call, "mlp.up_proj", dx, a);
}

/// Shazeer et al., arXiv 1701.06538, with the router of Mixtral (arXiv 2401.04088) and OLMoE (arXiv 2409.02060): the
/// sum over the experts that a token takes of share * down(silu(gate) * up). The share multiplies the activation, not
/// what down makes of it, which so need not be kept for the share's gradient.
class ExpertMlp final : public Mlp {
 public:
  ExpertMlp(const ModelConfig& config, const RunShape& shape, const Adapters& adapters)
      : adapters_(adapters),
        tokens_(shape.batch * shape.sequence),
        rows_(tokens_ * config.chosen_experts),
        width_(config.width),
        ffn_(config.ffn),
        experts_(config.experts),
        choices_(config.chosen_experts),
        compute_(shape.compute),
        selective_(shape.selective),
        training_(shape.training),
        normalized_(config.normalized_weights) {}

  void take_shared(Carver& carver, MlpBuffers& b) const override {
    if (selective_) b.act = activation(carver);
    b.rows = carver.take(compute_, {rows_, width_});
    if (!training_) return;
    b.dlogits = carver.take(compute_, {tokens_, experts_});
    b.drouting_weights = carver.take(DType::f32, {tokens_, choices_});
  }
  void take(Carver& carver, MlpBuffers& b) const override {
    b.logits = carver.take(DType::f32, {tokens_, experts_});
    b.routing = {.experts = carver.take(DType::i32, {tokens_, choices_}),
                 .weights = carver.take(DType::f32, {tokens_, choices_}),
                 .begins = carver.take(DType::i32, {experts_ + 1}),
                 .slots = carver.take(DType::i32, {rows_}),
                 .rows = carver.take(DType::i32, {tokens_, choices_})};
    b.gate = activation(carver);
    b.up = activation(carver);
    if (!selective_) b.act = activation(carver);
  }
  MlpBuffers first_tokens(MlpBuffers b, std::int64_t n) const override {
    Routing& r = b.routing;
    for (TensorView* rows : {&b.logits, &r.experts, &r.weights, &r.rows}) *rows = first_rows(*rows, n);
    for (TensorView* rows : {&b.gate, &b.up, &b.act, &b.rows, &r.slots}) *rows = first_rows(*rows, n * choices_);
    return b;
  }
  void forward(const BlockForward& call, MeasuredView x, const MlpBuffers& b, const AdapterBuffers& a) const override;
  void activate(const BlockForward& call, const MlpBuffers& b) const override {
    call.ops.expert_swiglu(b.gate, b.up, b.routing, b.act, call.stream);
  }
  void finish(const BlockForward& call, const MlpBuffers& b, const AdapterBuffers& a, TensorView residual,
              TensorView y) const override {
    const TensorView rows = y ? b.rows : TensorView{};
    if (y) call.ops.expert_linear({b.act}, call.weights["mlp.experts.down_proj.weight"], b.routing, rows, call.stream);
    adapters_.expert_forward(call, "mlp.experts.down_proj", {b.act}, b.routing, rows, a);
    if (y) call.ops.sum_rows(rows, b.routing, residual, y, call.stream);
  }
  void backward(const BlockBackward& call, TensorView dy, MeasuredView x, const MlpBuffers& b, const AdapterBuffers& a,
                TensorView dx, bool accumulate) const override;

 private:
  TensorView activation(Carver& carver) const { return carver.take(compute_, {rows_, ffn_}); }

  const Adapters& adapters_;
  std::int64_t tokens_, rows_, width_, ffn_, experts_, choices_;
  DType compute_;
  bool selective_, training_, normalized_;
};

void ExpertMlp::forward(const BlockForward& call, MeasuredView of, const MlpBuffers& b, const AdapterBuffers& a) const {
  const TensorView x = of.values;
  Ops& ops = call.ops;
  const StreamView s = call.stream;
  const WeightsGuard& w = call.weights;
  const RowValues input{x, /*of_tokens=*/true};
  linear(call, x, w["mlp.gate.weight"], {}, b.logits);
  adapters_.forward(call, router_module, x, b.logits, a);
  ops.route(b.logits, normalized_, b.routing, s);
  ops.expert_linear(input, w["mlp.experts.gate_proj.weight"], b.routing, b.gate, s);
  adapters_.expert_forward(call, "mlp.experts.gate_proj", input, b.routing, b.gate, a);
  ops.expert_linear(input, w["mlp.experts.up_proj.weight"], b.routing, b.up, s);
  adapters_.expert_forward(call, "mlp.experts.up_proj", input, b.routing, b.up, a);
  activate(call, b);
}

/// The gradients of a projection of all experts, left out where it is frozen.
void add_expert_gradients(const BlockBackward& call, RowValues dy, RowValues x, const Routing& routing,
                          std::string_view name) {
  const TensorView dweight = call.gradients[name];
  if (dweight) call.ops.expert_backward_weight(dy, x, routing, dweight, call.stream);
}

void ExpertMlp::backward(const BlockBackward& call, TensorView dy, MeasuredView of, const MlpBuffers& b,
                         const AdapterBuffers& a, TensorView dx, bool accumulate) const {
  const TensorView x = of.values;
  Ops& ops = call.ops;
  const StreamView s = call.stream;
  const WeightsGuard& w = call.weights;
  const RowValues input{x, /*of_tokens=*/true}, dresult{dy, /*of_tokens=*/true};
  add_expert_gradients(call, dresult, {b.act}, b.routing, "mlp.experts.down_proj.weight");
  adapters_.expert_parameter_gradients(call, "mlp.experts.down_proj", dresult, {b.act}, b.routing, a);
  const TensorView dact = b.act, dgate = b.gate, dup = b.up;
  ops.expert_backward_input(dresult, w["mlp.experts.down_proj.weight"], b.routing, dact, false, s);
  adapters_.expert_input_gradient(call, "mlp.experts.down_proj", b.routing, dact, a);
  ops.expert_swiglu_backward(dact, b.gate, b.up, b.routing, dgate, dup, b.drouting_weights, s);
  add_expert_gradients(call, {dgate}, input, b.routing, "mlp.experts.gate_proj.weight");
  add_expert_gradients(call, {dup}, input, b.routing, "mlp.experts.up_proj.weight");
  adapters_.expert_parameter_gradients(call, "mlp.experts.gate_proj", {dgate}, input, b.routing, a);
  adapters_.expert_parameter_gradients(call, "mlp.experts.up_proj", {dup}, input, b.routing, a);
  ops.route_backward(b.drouting_weights, b.logits, normalized_, b.routing, b.dlogits, s);
  add_linear_gradients(call, b.dlogits, x, call.gradients["mlp.gate.weight"]);
  adapters_.parameter_gradients(call, router_module, b.dlogits, x, a);
  ops.expert_backward_input({dgate}, w["mlp.experts.gate_proj.weight"], b.routing, b.rows, false, s);
  ops.expert_backward_input({dup}, w["mlp.experts.up_proj.weight"], b.routing, b.rows, true, s);
  adapters_.expert_input_gradient(call, "mlp.experts.gate_proj", b.routing, b.rows, a);
  adapters_.expert_input_gradient(call, "mlp.experts.up_proj", b.routing, b.rows, a);
  ops.sum_rows(b.rows, b.routing, accumulate ? dx : TensorView{}, dx, s);
  ops.linear_backward_input(b.dlogits, w["mlp.gate.weight"], dx, true, s);
  adapters_.input_gradient(call, router_module, dx, a);
}

}  // namespace

std::unique_ptr<Mlp> make_mlp(const ModelConfig& config, const RunShape& shape, const Adapters& adapters) {
  if (config.experts > 0) return std::make_unique<ExpertMlp>(config, shape, adapters);
  return std::make_unique<DenseMlp>(config, shape, adapters);
}

}  // namespace tandem
