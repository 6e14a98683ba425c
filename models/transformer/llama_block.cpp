// The Llama family (Touvron et al., arXiv 2302.13971): x1 = x + o(attention(rope(q, k), v)) of the RMS norm
// of x, y = x1 + down(silu(gate) * up) of the RMS norm of x1. Qwen2 adds biases to q, k and v, Qwen3 an RMS
// norm over each head of q and k before the rotation; Mixtral, Qwen3 MoE and OLMoE have experts in the MLP's place
// (mlp.hpp). OLMo 2 (arXiv 2501.00656) has that over all heads at once, and
// RMS norms of what o and down made, before it is added, in place of those of x and x1; Gemma 3 (arXiv 2503.19786)
// beside them; Granite a factor.
#include <cmath>
#include <vector>

#include "models/config/rope.hpp"
#include "models/transformer/adapters.hpp"
#include "models/transformer/block.hpp"
#include "models/transformer/mlp.hpp"

namespace tandem {
namespace {

/// Buffers of one block; H D is the width of the queries, K D that of keys and values. In backward,
/// gradients take the place of what they have used up. Those with a star are the same of all blocks in a selective
/// shape.
struct LlamaBuffers {
  TensorView rstd1, rstd2;          ///< (N) f32, of the norms before attention and MLP
  TensorView rstd_o, rstd_down;     ///< (N) f32, of those after
  TensorView rstd_q, rstd_k;        ///< (N H), (N K) f32, with QK norm of each head; (N) of whole rows
  TensorView lse;                   ///< (B, H, T) f32
  TensorView norm1;                 ///< * (N, C); backward: its gradient
  TensorView q, k, v;               ///< (N, H D), (N, K D) twice; rotated in place without QK norm
  TensorView q_rotated, k_rotated;  ///< * what attention reads: q and k themselves without QK norm
  TensorView att;                   ///< (N, H D)
  TensorView x1;                    ///< (N, C)
  TensorView norm2;                 ///< * (N, C); backward: its gradient
  TensorView o, down;               ///< (N, C), with norms after attention and MLP: what these are of
  TensorView dbranch;               ///< (N, C), of all blocks: gradient of o or down, where a norm or a factor follows
  MlpBuffers mlp;
  TensorView datt, dq, dk, dv;  ///< sizes of att, q, k, v; in memory that `mlp` does not share
  AdapterBuffers adapters;
  InputMagnitudes magnitudes;  ///< magnitudes of the inputs of attention, o and the MLP
};

class LlamaBlock final : public Block {
 public:
  LlamaBlock(const ModelConfig& config, const RunShape& shape)
      : config_(config),
        shape_(shape),
        tokens_(shape.batch * shape.sequence),
        positions_(shape.cached > 0 ? shape.cached : shape.sequence),
        query_(config.heads * config.head_dim),
        key_(config.kv_heads * config.head_dim),
        eps_(static_cast<float>(config.norm_eps)),
        offset_(static_cast<float>(config.norm_offset)),
        attention_{.batch = shape.batch,
                   .sequence = shape.sequence,
                   .heads = config.heads,
                   .kv_heads = config.kv_heads,
                   .head_dim = config.head_dim,
                   .scale = static_cast<float>(
                       config.attention_scale.value_or(1.0 / std::sqrt(static_cast<double>(config.head_dim))))},
        adapters_(config, shape),
        mlp_(make_mlp(config, shape, adapters_)),
        has_table_(any_layer([](const AttentionKind& kind) { return kind.rotated; })),
        has_window_table_(!config.scales_all && any_layer([](const AttentionKind& kind) { return kind.windowed; })) {}

  void take_shared(Carver& carver) override;
  void take_buffers(Carver& carver) override;
  void take_tables(Carver& carver) override;
  void write_tables(Device& device, StreamView stream) override;
  void forward(const BlockForward& call, std::size_t slot) override;
  void complete(const BlockForward& call, std::size_t slot) override;
  void backward(const BlockBackward& call, std::size_t slot) override;

 private:
  void take_statistics(Carver& carver, LlamaBuffers& b) const;
  void take_attention(Carver& carver, LlamaBuffers& b) const;
  void take_mlp(Carver& carver, LlamaBuffers& b) const;
  void take_rotated(Carver& carver, LlamaBuffers& b) const;
  void take_middle(Carver& carver, LlamaBuffers& b) const;
  void normalize_input(const BlockForward& call, const LlamaBuffers& b) const;
  void project(const BlockForward& call, const LlamaBuffers& b) const;
  void normalize_heads(const BlockForward& call, const LlamaBuffers& b) const;
  void normalize_middle(const BlockForward& call, const LlamaBuffers& b) const;
  template <class Call>
  void rotate(const Call& call, TensorView q, TensorView k, bool inverse) const;
  void write_table(Device& device, TensorView table, const Rope& rope, StreamView stream) const;
  void add_attention(const BlockForward& call, const LlamaBuffers& b) const;
  void add_mlp(const BlockForward& call, const LlamaBuffers& b) const;
  TensorView branch_backward(const BlockBackward& call, std::string_view name, TensorView made, TensorView rstd,
                             const LlamaBuffers& b) const;
  void mlp_backward(const BlockBackward& call, const LlamaBuffers& b) const;
  void attention_backward(const BlockBackward& call, const LlamaBuffers& b) const;
  void qk_norm_backward(const BlockBackward& call, const LlamaBuffers& b) const;
  void project_backward(const BlockBackward& call, const LlamaBuffers& b) const;

  TensorView activation(Carver& carver, std::int64_t width) const {
    return carver.take(shape_.compute, {tokens_, width});
  }
  static HeadsView heads(TensorView x) { return {x.data, x.dtype, x.shape[1]}; }
  /// View as (B, T, H D).
  TensorView by_sequence(TensorView x) const { return x.reshaped({shape_.batch, x.shape[0] / shape_.batch, query_}); }
  /// Buffers of a slot, with the magnitudes of its inputs. With experts the MLP has no eight-bit products.
  template <class Call>
  LlamaBuffers buffers_of(const Call& call, std::size_t slot) const {
    LlamaBuffers b = slots_.at(slot);
    b.magnitudes = input_magnitudes(call.fp8, slot);
    if (config_.experts > 0) b.magnitudes.mlp = b.magnitudes.down = nullptr;
    b.mlp.act_magnitude = b.magnitudes.down;
    return b;
  }
  /// Buffers of forward for the first `n` tokens.
  LlamaBuffers first_tokens(LlamaBuffers b, std::int64_t n) const;
  /// Rows of q or k that a QK norm is over: each head, as (N heads, D), or all of a token's.
  TensorView norm_rows(TensorView x) const {
    if (config_.qk_norm == QkNorm::whole) return x;
    return x.reshaped({x.count() / config_.head_dim, config_.head_dim});
  }
  /// Number of norms among the values of q or k of so many tokens.
  std::int64_t norm_count(std::int64_t tokens, std::int64_t heads) const {
    return config_.qk_norm == QkNorm::whole ? tokens : tokens * heads;
  }
  bool qk_norm() const { return config_.qk_norm != QkNorm::none; }
  template <class Call>
  AttentionShape attention(const Call& call) const {
    AttentionShape shape = attention_;
    shape.sequence = call.x.shape[0] / shape_.batch;
    shape.window = config_.window_of(call.layer);
    shape.records = call.records;
    return shape;
  }
  template <class Predicate>
  bool any_layer(const Predicate& predicate) const {
    for (std::int64_t layer = 0; layer < config_.layers; ++layer) {
      if (predicate(config_.attention_of(layer))) return true;
    }
    return false;
  }
  bool scaled() const { return config_.residual_factor != 1.0; }
  float factor() const { return static_cast<float>(config_.residual_factor); }
  NormWeight norm_weight(const WeightsGuard& weights, std::string_view name) const { return {weights[name], offset_}; }
  /// Name of the norm before the MLP. Where there is no norm after attention, files give it that one's name.
  const char* middle_norm() const {
    return config_.norm_after ? "pre_feedforward_layernorm.weight" : "post_attention_layernorm.weight";
  }
  /// Inputs of attention and of the MLP.
  TensorView attention_input(TensorView x, const LlamaBuffers& b) const { return config_.norm_before ? b.norm1 : x; }
  TensorView mlp_input(const LlamaBuffers& b) const { return config_.norm_before ? b.norm2 : b.x1; }
  /// One of these with its magnitude, which a norm has written; without a norm it is found here.
  MeasuredView with_magnitude(const BlockForward& call, TensorView input, void* magnitude) const {
    return config_.norm_before ? MeasuredView(input, magnitude) : measured(call, input, magnitude);
  }
  /// Places where the gradients of these inputs are added up: dy itself where the inputs are no norms.
  TensorView attention_input_gradient(TensorView dy, const LlamaBuffers& b) const {
    return config_.norm_before ? b.norm1 : dy;
  }
  TensorView mlp_input_gradient(TensorView dy, const LlamaBuffers& b) const {
    return config_.norm_before ? b.norm2 : dy;
  }

  ModelConfig config_;
  RunShape shape_;
  std::int64_t tokens_;
  std::int64_t positions_;  ///< rows of the tables
  std::int64_t query_;
  std::int64_t key_;
  float eps_, offset_;
  AttentionShape attention_;
  Adapters adapters_;
  std::unique_ptr<Mlp> mlp_;
  bool has_table_, has_window_table_;
  TensorView table_;         ///< (positions, R/2, 2) f32, R of D elements of a head are rotated
  TensorView window_table_;  ///< table of layers with a window, where theirs differs
  LlamaBuffers shared_;      ///< buffers with a star, in a selective shape
  std::vector<LlamaBuffers> slots_;
};

void LlamaBlock::take_rotated(Carver& carver, LlamaBuffers& b) const {
  b.q_rotated = activation(carver, query_);
  b.k_rotated = activation(carver, key_);
}

/// The MLP's normalised input.
void LlamaBlock::take_middle(Carver& carver, LlamaBuffers& b) const {
  if (config_.norm_before) b.norm2 = activation(carver, config_.width);
}

void LlamaBlock::take_shared(Carver& carver) {
  mlp_->take_shared(carver, shared_.mlp);
  adapters_.take_shared(carver, shared_.adapters);
  if (shape_.training && (config_.norm_after || scaled())) shared_.dbranch = activation(carver, config_.width);
  if (!shape_.selective) return;
  if (config_.norm_before) shared_.norm1 = activation(carver, config_.width);
  take_middle(carver, shared_);
  if (qk_norm()) take_rotated(carver, shared_);
}

void LlamaBlock::take_statistics(Carver& carver, LlamaBuffers& b) const {
  const auto of_rows = [&] { return carver.take(DType::f32, {tokens_}); };
  if (config_.norm_before) {
    b.rstd1 = of_rows();
    b.rstd2 = of_rows();
  }
  if (config_.norm_after) {
    b.rstd_o = of_rows();
    b.rstd_down = of_rows();
  }
  if (qk_norm()) {
    b.rstd_q = carver.take(DType::f32, {norm_count(tokens_, config_.heads)});
    b.rstd_k = carver.take(DType::f32, {norm_count(tokens_, config_.kv_heads)});
  }
  if (shape_.training) b.lse = carver.take(DType::f32, {shape_.batch, config_.heads, shape_.sequence});
}

void LlamaBlock::take_attention(Carver& carver, LlamaBuffers& b) const {
  if (!shape_.selective && config_.norm_before) b.norm1 = activation(carver, config_.width);
  b.q = activation(carver, query_);
  b.k = activation(carver, key_);
  b.v = activation(carver, key_);
  if (!qk_norm()) {
    b.q_rotated = b.q;
    b.k_rotated = b.k;
  } else if (!shape_.selective) {
    take_rotated(carver, b);
  }
  b.att = activation(carver, query_);
  if (config_.norm_after) b.o = activation(carver, config_.width);
}

void LlamaBlock::take_mlp(Carver& carver, LlamaBuffers& b) const {
  if (config_.norm_after) b.down = activation(carver, config_.width);
  if (!shape_.selective) take_middle(carver, b);
  const auto forward = [&] { mlp_->take(carver, b.mlp); };
  const auto backward = [&] {
    if (!shape_.training) return;
    b.datt = activation(carver, query_);
    b.dq = activation(carver, query_);
    b.dk = activation(carver, key_);
    b.dv = activation(carver, key_);
  };
  carver.overlay(forward, backward);
}

void LlamaBlock::take_buffers(Carver& carver) {
  LlamaBuffers b = shared_;
  take_statistics(carver, b);
  adapters_.take(carver, b.adapters);
  b.x1 = activation(carver, config_.width);
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

void LlamaBlock::take_tables(Carver& carver) {
  const auto take = [&] { return carver.take(DType::f32, {positions_, config_.rotary_dim() / 2, 2}); };
  if (has_table_) table_ = take();
  if (has_window_table_) window_table_ = take();
}

void LlamaBlock::write_tables(Device& device, StreamView stream) {
  if (has_table_) write_table(device, table_, config_.rope(/*windowed=*/false), stream);
  if (has_window_table_) write_table(device, window_table_, config_.rope(/*windowed=*/true), stream);
}

void LlamaBlock::write_table(Device& device, TensorView table, const Rope& rope, StreamView stream) const {
  const std::vector<float> values = rope_table(config_, rope, positions_);
  device.copy(table.data, values.data(), table.bytes(), CopyKind::host_to_device, stream);
  device.synchronize(stream);  // `values` goes
}

/// Rotates q and k of a forward, or their gradients of a backward.
template <class Call>
void LlamaBlock::rotate(const Call& call, TensorView q, TensorView k, bool inverse) const {
  const AttentionKind kind = config_.attention_of(call.layer);
  if (!kind.rotated) return;
  const TensorView table = kind.windowed && has_window_table_ ? window_table_ : table_;
  const auto view = [&](TensorView x, std::int64_t count) {
    return x.reshaped({shape_.batch, x.shape[0] / shape_.batch, count, config_.head_dim});
  };
  call.ops.rope(view(q, config_.heads), table, call.records, inverse, call.stream);
  call.ops.rope(view(k, config_.kv_heads), table, call.records, inverse, call.stream);
}

void LlamaBlock::normalize_input(const BlockForward& call, const LlamaBuffers& b) const {
  if (!config_.norm_before) return;
  call.ops.rms_norm(call.x, norm_weight(call.weights, "input_layernorm.weight"), {b.norm1, b.magnitudes.attention},
                    b.rstd1, eps_, call.stream);
}

void LlamaBlock::project(const BlockForward& call, const LlamaBuffers& b) const {
  const WeightsGuard& w = call.weights;
  const TensorView x = attention_input(call.x, b);
  const LinearInput input = linear_input(call, with_magnitude(call, x, b.magnitudes.attention));
  const auto product = [&](const char* module, const char* weight, const char* bias_name, TensorView y) {
    linear(call, input, w[weight], bias_of(config_.qkv_bias, w, bias_name), y);
    adapters_.forward(call, module, x, y, b.adapters);
  };
  product("self_attn.q_proj", "self_attn.q_proj.weight", "self_attn.q_proj.bias", b.q);
  product("self_attn.k_proj", "self_attn.k_proj.weight", "self_attn.k_proj.bias", b.k);
  product("self_attn.v_proj", "self_attn.v_proj.weight", "self_attn.v_proj.bias", b.v);
  if (qk_norm()) {
    normalize_heads(call, b);
  } else {
    rotate(call, b.q, b.k, false);
  }
}

/// Norms of q and k, which are then rotated.
void LlamaBlock::normalize_heads(const BlockForward& call, const LlamaBuffers& b) const {
  const WeightsGuard& w = call.weights;
  const StreamView s = call.stream;
  call.ops.rms_norm(norm_rows(b.q), norm_weight(w, "self_attn.q_norm.weight"), norm_rows(b.q_rotated), b.rstd_q, eps_,
                    s);
  call.ops.rms_norm(norm_rows(b.k), norm_weight(w, "self_attn.k_norm.weight"), norm_rows(b.k_rotated), b.rstd_k, eps_,
                    s);
  rotate(call, b.q_rotated, b.k_rotated, false);
}

/// x1, of attention's result.
void LlamaBlock::add_attention(const BlockForward& call, const LlamaBuffers& b) const {
  const WeightsGuard& w = call.weights;
  const TensorView weight = w["self_attn.o_proj.weight"];
  const TensorView o_bias = bias_of(config_.output_bias, w, "self_attn.o_proj.bias");
  const LinearInput input = linear_input(call, measured(call, b.att, b.magnitudes.output));
  const auto adapt = [&](TensorView y) { adapters_.forward(call, "self_attn.o_proj", b.att, y, b.adapters); };
  if (scaled()) {
    linear(call, input, weight, o_bias, b.x1);
    adapt(b.x1);
    return call.ops.add_scaled(b.x1, factor(), call.x, b.x1, call.stream);
  }
  if (!config_.norm_after) {
    linear_add(call, input, weight, o_bias, call.x, b.x1);
    return adapt(b.x1);
  }
  linear(call, input, weight, o_bias, b.o);
  adapt(b.o);
  call.ops.rms_norm(b.o, norm_weight(w, "post_attention_layernorm.weight"), b.x1, b.rstd_o, eps_, call.stream);
  call.ops.add(call.x, b.x1, b.x1, call.stream);
}

void LlamaBlock::normalize_middle(const BlockForward& call, const LlamaBuffers& b) const {
  if (!config_.norm_before) return;
  call.ops.rms_norm(b.x1, norm_weight(call.weights, middle_norm()), {b.norm2, b.magnitudes.mlp}, b.rstd2, eps_,
                    call.stream);
}

/// y, of the activation. A norm after the MLP needs what that made in backward too.
void LlamaBlock::add_mlp(const BlockForward& call, const LlamaBuffers& b) const {
  if (!config_.norm_after) {
    mlp_->finish(call, b.mlp, b.adapters, scaled() ? TensorView{} : b.x1, call.y);
    if (call.y && scaled()) call.ops.add_scaled(call.y, factor(), b.x1, call.y, call.stream);
    return;
  }
  mlp_->finish(call, b.mlp, b.adapters, {}, b.down);
  const TensorView normalized = call.y ? call.y : b.dbranch;
  call.ops.rms_norm(b.down, norm_weight(call.weights, "post_feedforward_layernorm.weight"), normalized, b.rstd_down,
                    eps_, call.stream);
  if (call.y) call.ops.add(b.x1, call.y, call.y, call.stream);
}

LlamaBuffers LlamaBlock::first_tokens(LlamaBuffers b, std::int64_t n) const {
  for (TensorView* rows : {&b.rstd1, &b.rstd2, &b.rstd_o, &b.rstd_down, &b.norm1, &b.q, &b.k, &b.v, &b.q_rotated,
                           &b.k_rotated, &b.att, &b.x1, &b.norm2, &b.o, &b.down}) {
    *rows = first_rows(*rows, n);
  }
  b.rstd_q = first_rows(b.rstd_q, norm_count(n, config_.heads));
  b.rstd_k = first_rows(b.rstd_k, norm_count(n, config_.kv_heads));
  b.mlp = mlp_->first_tokens(b.mlp, n);
  b.adapters = adapters_.first_tokens(b.adapters, n);
  return b;
}

void LlamaBlock::forward(const BlockForward& call, std::size_t slot) {
  const LlamaBuffers of_slot = buffers_of(call, slot),
                     b = call.cached ? first_tokens(of_slot, call.x.shape[0]) : of_slot;
  normalize_input(call, b);
  project(call, b);
  attend(call, {heads(b.q_rotated), heads(b.k_rotated), heads(b.v)}, by_sequence(b.att), b.lse, attention(call));
  add_attention(call, b);
  normalize_middle(call, b);
  mlp_->forward(call, with_magnitude(call, mlp_input(b), b.magnitudes.mlp), b.mlp, b.adapters);
  add_mlp(call, b);
}

void LlamaBlock::complete(const BlockForward& call, std::size_t slot) {
  const LlamaBuffers b = buffers_of(call, slot);
  normalize_input(call, b);
  if (qk_norm()) normalize_heads(call, b);
  normalize_middle(call, b);
  mlp_->activate(call, b.mlp);
}

void LlamaBlock::backward(const BlockBackward& call, std::size_t slot) {
  const LlamaBuffers b = buffers_of(call, slot);
  mlp_backward(call, b);
  attention_backward(call, b);
  if (qk_norm()) qk_norm_backward(call, b);
  project_backward(call, b);
}

/// Gradient of the output of attention or MLP, before a norm or a factor, from dy: dy itself where there is neither.
TensorView LlamaBlock::branch_backward(const BlockBackward& call, std::string_view name, TensorView made,
                                       TensorView rstd, const LlamaBuffers& b) const {
  if (scaled()) {
    call.ops.add_scaled(call.dy, factor(), {}, b.dbranch, call.stream);
    return b.dbranch;
  }
  if (!config_.norm_after) return call.dy;
  call.ops.rms_norm_backward(call.dy, made, norm_weight(call.weights, name), rstd, b.dbranch, false,
                             call.gradients[name], call.stream);
  return b.dbranch;
}

/// `dy` becomes the gradient of x1.
void LlamaBlock::mlp_backward(const BlockBackward& call, const LlamaBuffers& b) const {
  const auto& [ops, s, w, g, layer, records, x, dy, draw, fp8] = call;
  const TensorView ddown = branch_backward(call, "post_feedforward_layernorm.weight", b.down, b.rstd_down, b);
  const TensorView dinput = mlp_input_gradient(dy, b);
  mlp_->backward(call, ddown, {mlp_input(b), b.magnitudes.mlp}, b.mlp, b.adapters, dinput, !config_.norm_before);
  if (!config_.norm_before) return;
  ops.rms_norm_backward(dinput, b.x1, norm_weight(w, middle_norm()), b.rstd2, dy, true, g[middle_norm()], s);
}

/// Computes the gradients of q, k (before rotation) and v from that of x1.
void LlamaBlock::attention_backward(const BlockBackward& call, const LlamaBuffers& b) const {
  const auto& [ops, s, w, g, layer, records, x, dy, draw, fp8] = call;
  const TensorView d_o = branch_backward(call, "post_attention_layernorm.weight", b.o, b.rstd_o, b);
  const LinearGradient dresult = linear_gradient(call, d_o);
  const TensorView dweight = g["self_attn.o_proj.weight"];
  add_linear_gradients(call, dresult, linear_input(call, {b.att, b.magnitudes.output}, static_cast<bool>(dweight)),
                       dweight, bias_of(config_.output_bias, g, "self_attn.o_proj.bias"));
  adapters_.parameter_gradients(call, "self_attn.o_proj", d_o, b.att, b.adapters);
  linear_backward_input(call, dresult, w["self_attn.o_proj.weight"], b.datt, false);
  adapters_.input_gradient(call, "self_attn.o_proj", b.datt, b.adapters);
  ops.attention_backward(by_sequence(b.datt), heads(b.q_rotated), heads(b.k_rotated), heads(b.v), by_sequence(b.att),
                         b.lse, heads(b.dq), heads(b.dk), heads(b.dv), attention(call), s);
  rotate(call, b.dq, b.dk, true);
}

void LlamaBlock::qk_norm_backward(const BlockBackward& call, const LlamaBuffers& b) const {
  const auto& [ops, s, w, g, layer, records, x, dy, draw, fp8] = call;
  const TensorView dq = norm_rows(b.dq);
  const TensorView dk = norm_rows(b.dk);
  ops.rms_norm_backward(dq, norm_rows(b.q), norm_weight(w, "self_attn.q_norm.weight"), b.rstd_q, dq, false,
                        g["self_attn.q_norm.weight"], s);
  ops.rms_norm_backward(dk, norm_rows(b.k), norm_weight(w, "self_attn.k_norm.weight"), b.rstd_k, dk, false,
                        g["self_attn.k_norm.weight"], s);
}

/// `dy`, the gradient of x1, becomes the gradient of x.
void LlamaBlock::project_backward(const BlockBackward& call, const LlamaBuffers& b) const {
  const auto& [ops, s, w, g, layer, records, x, dy, draw, fp8] = call;
  const TensorView values = attention_input(x, b), dinput = attention_input_gradient(dy, b);
  const LinearGradient dq = linear_gradient(call, b.dq, 0), dk = linear_gradient(call, b.dk, 1),
                       dv = linear_gradient(call, b.dv, 2);
  const bool wanted = g["self_attn.q_proj.weight"] || g["self_attn.k_proj.weight"] || g["self_attn.v_proj.weight"];
  const LinearInput input = linear_input(call, {values, b.magnitudes.attention}, wanted);
  const auto parameters = [&](const char* module, const char* weight, const char* bias_name, const LinearGradient& d) {
    const GradientsGuard& gradients = call.gradients;
    add_linear_gradients(call, d, input, gradients[weight], bias_of(config_.qkv_bias, gradients, bias_name));
    adapters_.parameter_gradients(call, module, d.values, input.values, b.adapters);
  };
  parameters("self_attn.q_proj", "self_attn.q_proj.weight", "self_attn.q_proj.bias", dq);
  parameters("self_attn.k_proj", "self_attn.k_proj.weight", "self_attn.k_proj.bias", dk);
  parameters("self_attn.v_proj", "self_attn.v_proj.weight", "self_attn.v_proj.bias", dv);
  linear_backward_input(call, dq, w["self_attn.q_proj.weight"], dinput, !config_.norm_before);
  linear_backward_input(call, dk, w["self_attn.k_proj.weight"], dinput, true);
  linear_backward_input(call, dv, w["self_attn.v_proj.weight"], dinput, true);
  for (const char* module : {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}) {
    adapters_.input_gradient(call, module, dinput, b.adapters);
  }
  if (!config_.norm_before) return;
  ops.rms_norm_backward(dinput, x, norm_weight(w, "input_layernorm.weight"), b.rstd1, dy, true,
                        g["input_layernorm.weight"], s);
}

}  // namespace

std::unique_ptr<Block> make_llama_block(const ModelConfig& config, const RunShape& shape) {
  return std::make_unique<LlamaBlock>(config, shape);
}

}  // namespace tandem
