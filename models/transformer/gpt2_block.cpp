// GPT-2 (Radford et al. 2019): x1 = x + proj(attention(ln_1(x))), y = x1 + c_proj(gelu(c_fc(ln_2(x1)))).
#include <cmath>
#include <vector>

#include "models/transformer/adapters.hpp"
#include "models/transformer/block.hpp"

namespace tandem {
namespace {

/// Buffers of one block. In backward, gradients take the place of what they have used up. Those with a star are the
/// same of all blocks in a selective shape, `act` only where ops can make it again.
struct Gpt2Buffers {
  TensorView mean1, rstd1, mean2, rstd2;  ///< (N) f32
  TensorView ln1;                         ///< * (N, C); backward: dln1
  TensorView qkv;                         ///< (N, 3C)
  TensorView lse;                         ///< (B, H, T) f32
  TensorView att;                         ///< (N, C)
  TensorView x1;                          ///< (N, C)
  TensorView ln2;                         ///< * (N, C); backward: dln2, then datt
  TensorView up;                          ///< (N, F); c_fc's output
  TensorView act;                         ///< * (N, F); backward: its gradient and up's
  TensorView dqkv;                        ///< (N, 3C), over up and, where it is not shared, act
  AdapterBuffers adapters;
  InputMagnitudes magnitudes;  ///< magnitudes of ln1, att, ln2 and act
};

class Gpt2Block final : public Block {
 public:
  Gpt2Block(const ModelConfig& config, const RunShape& shape, bool repeats_gelu)
      : shape_(shape),
        shares_act_(shape.selective && repeats_gelu),
        tokens_(shape.batch * shape.sequence),
        width_(config.width),
        ffn_(config.ffn),
        eps_(static_cast<float>(config.norm_eps)),
        attention_{.batch = shape.batch,
                   .sequence = shape.sequence,
                   .heads = config.heads,
                   .kv_heads = config.heads,
                   .head_dim = config.head_dim,
                   .scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(config.head_dim)))},
        adapters_(config, shape) {}

  void take_shared(Carver& carver) override;
  void take_buffers(Carver& carver) override;
  void forward(const BlockForward& call, std::size_t slot) override;
  void complete(const BlockForward& call, std::size_t slot) override;
  void backward(const BlockBackward& call, std::size_t slot) override;

 private:
  void take_statistics(Carver& carver, Gpt2Buffers& b) const;
  void take_attention(Carver& carver, Gpt2Buffers& b) const;
  void take_mlp(Carver& carver, Gpt2Buffers& b) const;
  void normalize_input(const BlockForward& call, const Gpt2Buffers& b) const;
  void normalize_middle(const BlockForward& call, const Gpt2Buffers& b) const;
  void activate(const BlockForward& call, const Gpt2Buffers& b) const;
  void activation_backward(const BlockBackward& call, const Gpt2Buffers& b, const LinearGradient& dy,
                           MeasuredView dup) const;
  void mlp_backward(const BlockBackward& call, const Gpt2Buffers& b) const;
  void attention_backward(const BlockBackward& call, const Gpt2Buffers& b) const;

  TensorView activation(Carver& carver, std::int64_t width) const {
    return carver.take(shape_.compute, {tokens_, width});
  }
  /// Third `part` (query, key, value) of a (N, 3C) buffer.
  HeadsView third(TensorView qkv, std::int64_t part) const {
    const auto offset = static_cast<std::size_t>(part * width_) * size_of(qkv.dtype);
    return {static_cast<std::byte*>(qkv.data) + offset, qkv.dtype, 3 * width_};
  }
  /// View as (B, T, C).
  TensorView by_sequence(TensorView x) const { return x.reshaped({shape_.batch, x.shape[0] / shape_.batch, width_}); }
  /// Buffers of a slot, with the magnitudes of its inputs.
  template <class Call>
  Gpt2Buffers buffers_of(const Call& call, std::size_t slot) const {
    Gpt2Buffers b = slots_.at(slot);
    b.magnitudes = input_magnitudes(call.fp8, slot);
    return b;
  }
  /// Buffers of forward for the first `n` tokens.
  Gpt2Buffers first_tokens(Gpt2Buffers b, std::int64_t n) const;

  template <class Call>
  AttentionShape attention(const Call& call) const {
    AttentionShape shape = attention_;
    shape.sequence = call.x.shape[0] / shape_.batch;
    shape.records = call.records;
    return shape;
  }

  RunShape shape_;
  bool shares_act_;
  std::int64_t tokens_;
  std::int64_t width_;
  std::int64_t ffn_;
  float eps_;
  AttentionShape attention_;
  Adapters adapters_;
  Gpt2Buffers shared_;  ///< buffers with a star, in a selective shape
  std::vector<Gpt2Buffers> slots_;
};

void Gpt2Block::take_shared(Carver& carver) {
  adapters_.take_shared(carver, shared_.adapters);
  if (!shape_.selective) return;
  shared_.ln1 = activation(carver, width_);
  shared_.ln2 = activation(carver, width_);
  if (shares_act_) shared_.act = activation(carver, ffn_);
}

void Gpt2Block::take_statistics(Carver& carver, Gpt2Buffers& b) const {
  for (TensorView* statistic : {&b.mean1, &b.rstd1, &b.mean2, &b.rstd2}) {
    *statistic = carver.take(DType::f32, {tokens_});
  }
  if (shape_.training) b.lse = carver.take(DType::f32, {shape_.batch, attention_.heads, shape_.sequence});
}

void Gpt2Block::take_attention(Carver& carver, Gpt2Buffers& b) const {
  if (!shape_.selective) b.ln1 = activation(carver, width_);
  b.qkv = activation(carver, 3 * width_);
  b.att = activation(carver, width_);
}

void Gpt2Block::take_mlp(Carver& carver, Gpt2Buffers& b) const {
  if (!shape_.selective) b.ln2 = activation(carver, width_);
  const auto forward = [&] {
    b.up = activation(carver, ffn_);
    if (!shares_act_) b.act = activation(carver, ffn_);
  };
  const auto backward = [&] {
    if (shape_.training) b.dqkv = activation(carver, 3 * width_);
  };
  carver.overlay(forward, backward);
}

void Gpt2Block::take_buffers(Carver& carver) {
  Gpt2Buffers b = shared_;
  take_statistics(carver, b);
  adapters_.take(carver, b.adapters);
  b.x1 = activation(carver, width_);
  const auto attention = [&] { take_attention(carver, b); };
  const auto mlp = [&] { take_mlp(carver, b); };
  if (shape_.training) {
    attention();
    mlp();
  } else {
    carver.overlay(attention, mlp);
  }
  slots_.push_back(b);
}

void Gpt2Block::normalize_input(const BlockForward& call, const Gpt2Buffers& b) const {
  const WeightsGuard& w = call.weights;
  call.ops.layer_norm(call.x, w["ln_1.weight"], w["ln_1.bias"], {b.ln1, b.magnitudes.attention}, b.mean1, b.rstd1, eps_,
                      call.stream);
}

void Gpt2Block::normalize_middle(const BlockForward& call, const Gpt2Buffers& b) const {
  const WeightsGuard& w = call.weights;
  call.ops.layer_norm(b.x1, w["ln_2.weight"], w["ln_2.bias"], {b.ln2, b.magnitudes.mlp}, b.mean2, b.rstd2, eps_,
                      call.stream);
}

Gpt2Buffers Gpt2Block::first_tokens(Gpt2Buffers b, std::int64_t n) const {
  for (TensorView* rows :
       {&b.mean1, &b.rstd1, &b.mean2, &b.rstd2, &b.ln1, &b.qkv, &b.att, &b.x1, &b.ln2, &b.up, &b.act}) {
    *rows = first_rows(*rows, n);
  }
  b.adapters = adapters_.first_tokens(b.adapters, n);
  return b;
}

void Gpt2Block::forward(const BlockForward& call, std::size_t slot) {
  const Gpt2Buffers of_slot = buffers_of(call, slot),
                    b = call.cached ? first_tokens(of_slot, call.x.shape[0]) : of_slot;
  const WeightsGuard& w = call.weights;
  normalize_input(call, b);
  linear(call, linear_input(call, {b.ln1, b.magnitudes.attention}), w["attn.c_attn.weight"], w["attn.c_attn.bias"],
         b.qkv);
  adapters_.forward(call, "attn.c_attn", b.ln1, b.qkv, b.adapters);
  attend(call, {third(b.qkv, 0), third(b.qkv, 1), third(b.qkv, 2)}, by_sequence(b.att), b.lse, attention(call));
  linear_add(call, linear_input(call, measured(call, b.att, b.magnitudes.output)), w["attn.c_proj.weight"],
             w["attn.c_proj.bias"], call.x, b.x1);
  adapters_.forward(call, "attn.c_proj", b.att, b.x1, b.adapters);
  normalize_middle(call, b);
  activate(call, b);
  if (call.y) {
    linear_add(call, linear_input(call, {b.act, b.magnitudes.down}), w["mlp.c_proj.weight"], w["mlp.c_proj.bias"], b.x1,
               call.y);
  }
  adapters_.forward(call, "mlp.c_proj", b.act, call.y, b.adapters);
}

/// The MLP up to its activation. What an adapter adds comes before GELU, which is then an operation of its own.
void Gpt2Block::activate(const BlockForward& call, const Gpt2Buffers& b) const {
  const TensorView weight = call.weights["mlp.c_fc.weight"], bias = call.weights["mlp.c_fc.bias"];
  const LinearInput x = linear_input(call, {b.ln2, b.magnitudes.mlp});
  const MeasuredView act(b.act, b.magnitudes.down);
  if (!adapters_.has(call.layer, "mlp.c_fc")) return linear_gelu(call, x, weight, bias, b.up, act);
  linear(call, x, weight, bias, b.up);
  adapters_.forward(call, "mlp.c_fc", b.ln2, b.up, b.adapters);
  call.ops.gelu(b.up, act, call.stream);
}

void Gpt2Block::complete(const BlockForward& call, std::size_t slot) {
  const Gpt2Buffers b = buffers_of(call, slot);
  normalize_input(call, b);
  normalize_middle(call, b);
  if (shares_act_) call.ops.gelu(b.up, b.act, call.stream);
}

void Gpt2Block::backward(const BlockBackward& call, std::size_t slot) {
  const Gpt2Buffers b = buffers_of(call, slot);
  mlp_backward(call, b);
  attention_backward(call, b);
}

/// Computes `dup`, the gradient of `up`, from `dy`, that of the MLP's result.
void Gpt2Block::activation_backward(const BlockBackward& call, const Gpt2Buffers& b, const LinearGradient& dy,
                                    MeasuredView dup) const {
  const TensorView weight = call.weights["mlp.c_proj.weight"];
  if (!adapters_.has(call.layer, "mlp.c_proj")) return linear_gelu_backward_input(call, dy, weight, b.up, dup);
  linear_backward_input(call, dy, weight, dup.values, false);
  adapters_.input_gradient(call, "mlp.c_proj", dup.values, b.adapters);
  call.ops.gelu_backward(dup.values, b.up, dup, call.stream);
}

/// `dy` becomes the gradient of x1.
void Gpt2Block::mlp_backward(const BlockBackward& call, const Gpt2Buffers& b) const {
  const auto& [ops, s, w, g, layer, records, x, dy, draw, fp8] = call;
  const LinearGradient dresult = linear_gradient(call, dy);
  const TensorView dproj = g["mlp.c_proj.weight"], dfc = g["mlp.c_fc.weight"];
  add_linear_gradients(call, dresult, linear_input(call, {b.act, b.magnitudes.down}, static_cast<bool>(dproj)), dproj,
                       g["mlp.c_proj.bias"]);
  adapters_.parameter_gradients(call, "mlp.c_proj", dy, b.act, b.adapters);
  const MeasuredView dup(b.act, gradient_magnitude(call.fp8, 0));
  activation_backward(call, b, dresult, dup);
  const LinearGradient dfc_result = linear_gradient(call, dup);
  add_linear_gradients(call, dfc_result, linear_input(call, {b.ln2, b.magnitudes.mlp}, static_cast<bool>(dfc)), dfc,
                       g["mlp.c_fc.bias"]);
  adapters_.parameter_gradients(call, "mlp.c_fc", dup.values, b.ln2, b.adapters);
  const TensorView dln2 = b.ln2;
  linear_backward_input(call, dfc_result, w["mlp.c_fc.weight"], dln2, false);
  adapters_.input_gradient(call, "mlp.c_fc", dln2, b.adapters);
  ops.layer_norm_backward(dln2, b.x1, w["ln_2.weight"], b.mean2, b.rstd2, dy, true, g["ln_2.weight"], g["ln_2.bias"],
                          s);
}

/// `dy`, the gradient of x1, becomes the gradient of x.
void Gpt2Block::attention_backward(const BlockBackward& call, const Gpt2Buffers& b) const {
  const auto& [ops, s, w, g, layer, records, x, dy, draw, fp8] = call;
  const LinearGradient dresult = linear_gradient(call, dy);
  const TensorView dproj = g["attn.c_proj.weight"], dattn = g["attn.c_attn.weight"];
  add_linear_gradients(call, dresult, linear_input(call, {b.att, b.magnitudes.output}, static_cast<bool>(dproj)), dproj,
                       g["attn.c_proj.bias"]);
  adapters_.parameter_gradients(call, "attn.c_proj", dy, b.att, b.adapters);
  const TensorView datt = b.ln2;
  linear_backward_input(call, dresult, w["attn.c_proj.weight"], datt, false);
  adapters_.input_gradient(call, "attn.c_proj", datt, b.adapters);
  ops.attention_backward(by_sequence(datt), third(b.qkv, 0), third(b.qkv, 1), third(b.qkv, 2), by_sequence(b.att),
                         b.lse, third(b.dqkv, 0), third(b.dqkv, 1), third(b.dqkv, 2), attention(call), s);
  const LinearGradient dqkv = linear_gradient(call, b.dqkv);
  add_linear_gradients(call, dqkv, linear_input(call, {b.ln1, b.magnitudes.attention}, static_cast<bool>(dattn)), dattn,
                       g["attn.c_attn.bias"]);
  adapters_.parameter_gradients(call, "attn.c_attn", b.dqkv, b.ln1, b.adapters);
  const TensorView dln1 = b.ln1;
  linear_backward_input(call, dqkv, w["attn.c_attn.weight"], dln1, false);
  adapters_.input_gradient(call, "attn.c_attn", dln1, b.adapters);
  ops.layer_norm_backward(dln1, x, w["ln_1.weight"], b.mean1, b.rstd1, dy, true, g["ln_1.weight"], g["ln_1.bias"], s);
}

}  // namespace

std::unique_ptr<Block> make_gpt2_block(const ModelConfig& config, const RunShape& shape, bool repeats_gelu) {
  return std::make_unique<Gpt2Block>(config, shape, repeats_gelu);
}

}  // namespace tandem
