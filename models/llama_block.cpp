// The Llama family (Touvron et al., arXiv 2302.13971): x1 = x + o(attention(rope(q, k), v)) of the RMS norm
// of x, y = x1 + down(silu(gate) * up) of the RMS norm of x1. Qwen2 adds biases to q, k and v, Qwen3 an RMS
// norm over each head of q and k before the rotation.
#include <cmath>
#include <vector>

#include "models/block.hpp"
#include "models/rope_table.hpp"

namespace tandem {
namespace {

/// Buffers of one block; H D is the width of the queries, K D that of keys and values. In backward,
/// gradients take the place of what they have used up. Those with a star are the same of all blocks in a selective
/// shape.
struct LlamaBuffers {
  TensorView rstd1, rstd2;          ///< (N) f32
  TensorView rstd_q, rstd_k;        ///< (N H), (N K) f32, with QK norm
  TensorView lse;                   ///< (B, H, T) f32
  TensorView norm1;                 ///< * (N, C); backward: its gradient
  TensorView q, k, v;               ///< (N, H D), (N, K D) twice; rotated in place without QK norm
  TensorView q_rotated, k_rotated;  ///< * what attention reads: q and k themselves without QK norm
  TensorView att;                   ///< (N, H D)
  TensorView x1;                    ///< (N, C)
  TensorView norm2;                 ///< * (N, C); backward: its gradient
  TensorView gate, up;              ///< (N, F); backward: their gradients
  TensorView act;                   ///< * (N, F); backward: its gradient
  TensorView datt, dq, dk, dv;      ///< as att, q, k, v; over gate, up and, where it is not shared, act
};

class LlamaBlock final : public Block {
 public:
  LlamaBlock(const ModelConfig& config, const RunShape& shape)
      : config_(config),
        shape_(shape),
        tokens_(shape.batch * shape.sequence),
        query_(config.heads * config.head_dim),
        key_(config.kv_heads * config.head_dim),
        eps_(static_cast<float>(config.norm_eps)),
        attention_{.batch = shape.batch,
                   .sequence = shape.sequence,
                   .heads = config.heads,
                   .kv_heads = config.kv_heads,
                   .head_dim = config.head_dim,
                   .scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(config.head_dim)))} {}

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
  void normalize_input(const BlockForward& call, const LlamaBuffers& b) const;
  void project(const BlockForward& call, const LlamaBuffers& b) const;
  void normalize_heads(const BlockForward& call, const LlamaBuffers& b) const;
  void normalize_middle(const BlockForward& call, const LlamaBuffers& b) const;
  void rotate(Ops& ops, TensorView q, TensorView k, bool inverse, StreamView stream) const;
  void mlp_backward(const BlockBackward& call, const LlamaBuffers& b) const;
  void attention_backward(const BlockBackward& call, const LlamaBuffers& b) const;
  void qk_norm_backward(const BlockBackward& call, const LlamaBuffers& b) const;
  void project_backward(const BlockBackward& call, const LlamaBuffers& b) const;

  TensorView activation(Carver& carver, std::int64_t width) const {
    return carver.take(shape_.compute, {tokens_, width});
  }
  static HeadsView heads(TensorView x) { return {x.data, x.dtype, x.shape[1]}; }
  /// As (B, T, H D).
  TensorView by_sequence(TensorView x) const { return x.reshaped({shape_.batch, shape_.sequence, query_}); }
  /// As (N heads, D): each head a row.
  TensorView by_head(TensorView x) const { return x.reshaped({x.count() / config_.head_dim, config_.head_dim}); }
  TensorView bias(const WeightsGuard& w, std::string_view name) const {
    return config_.qkv_bias ? w[name] : TensorView{};
  }
  TensorView bias(const GradientsGuard& g, std::string_view name) const {
    return config_.qkv_bias ? g[name] : TensorView{};
  }

  ModelConfig config_;
  RunShape shape_;
  std::int64_t tokens_;
  std::int64_t query_;
  std::int64_t key_;
  float eps_;
  AttentionShape attention_;
  TensorView table_;     ///< (T, D/2, 2) f32
  LlamaBuffers shared_;  ///< of a selective shape: those with a star
  std::vector<LlamaBuffers> slots_;
};

void LlamaBlock::take_rotated(Carver& carver, LlamaBuffers& b) const {
  b.q_rotated = activation(carver, query_);
  b.k_rotated = activation(carver, key_);
}

void LlamaBlock::take_shared(Carver& carver) {
  shared_.norm1 = activation(carver, config_.width);
  shared_.norm2 = activation(carver, config_.width);
  if (config_.qk_norm) take_rotated(carver, shared_);
  shared_.act = activation(carver, config_.ffn);
}

void LlamaBlock::take_statistics(Carver& carver, LlamaBuffers& b) const {
  b.rstd1 = carver.take(DType::f32, {tokens_});
  b.rstd2 = carver.take(DType::f32, {tokens_});
  if (config_.qk_norm) {
    b.rstd_q = carver.take(DType::f32, {tokens_ * config_.heads});
    b.rstd_k = carver.take(DType::f32, {tokens_ * config_.kv_heads});
  }
  if (shape_.training) b.lse = carver.take(DType::f32, {shape_.batch, config_.heads, shape_.sequence});
}

void LlamaBlock::take_attention(Carver& carver, LlamaBuffers& b) const {
  if (!shape_.selective) b.norm1 = activation(carver, config_.width);
  b.q = activation(carver, query_);
  b.k = activation(carver, key_);
  b.v = activation(carver, key_);
  if (!config_.qk_norm) {
    b.q_rotated = b.q;
    b.k_rotated = b.k;
  } else if (!shape_.selective) {
    take_rotated(carver, b);
  }
  b.att = activation(carver, query_);
}

void LlamaBlock::take_mlp(Carver& carver, LlamaBuffers& b) const {
  if (!shape_.selective) b.norm2 = activation(carver, config_.width);
  const auto forward = [&] {
    b.gate = activation(carver, config_.ffn);
    b.up = activation(carver, config_.ffn);
    if (!shape_.selective) b.act = activation(carver, config_.ffn);
  };
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
  table_ = carver.take(DType::f32, {shape_.sequence, config_.head_dim / 2, 2});
}

void LlamaBlock::write_tables(Device& device, StreamView stream) {
  const std::vector<float> values = rope_table(config_, shape_.sequence);
  device.copy(table_.data, values.data(), table_.bytes(), CopyKind::host_to_device, stream);
  device.synchronize(stream);  // `values` goes
}

void LlamaBlock::rotate(Ops& ops, TensorView q, TensorView k, bool inverse, StreamView stream) const {
  const auto view = [&](TensorView x, std::int64_t count) {
    return x.reshaped({shape_.batch, shape_.sequence, count, config_.head_dim});
  };
  ops.rope(view(q, config_.heads), table_, inverse, stream);
  ops.rope(view(k, config_.kv_heads), table_, inverse, stream);
}

void LlamaBlock::normalize_input(const BlockForward& call, const LlamaBuffers& b) const {
  call.ops.rms_norm(call.x, call.weights["input_layernorm.weight"], b.norm1, b.rstd1, eps_, call.stream);
}

void LlamaBlock::project(const BlockForward& call, const LlamaBuffers& b) const {
  const WeightsGuard& w = call.weights;
  Ops& ops = call.ops;
  const StreamView s = call.stream;
  ops.linear(b.norm1, w["self_attn.q_proj.weight"], bias(w, "self_attn.q_proj.bias"), b.q, s);
  ops.linear(b.norm1, w["self_attn.k_proj.weight"], bias(w, "self_attn.k_proj.bias"), b.k, s);
  ops.linear(b.norm1, w["self_attn.v_proj.weight"], bias(w, "self_attn.v_proj.bias"), b.v, s);
  if (config_.qk_norm) {
    normalize_heads(call, b);
  } else {
    rotate(ops, b.q, b.k, false, s);
  }
}

/// Each head of q and k, rotated.
void LlamaBlock::normalize_heads(const BlockForward& call, const LlamaBuffers& b) const {
  const WeightsGuard& w = call.weights;
  const StreamView s = call.stream;
  call.ops.rms_norm(by_head(b.q), w["self_attn.q_norm.weight"], by_head(b.q_rotated), b.rstd_q, eps_, s);
  call.ops.rms_norm(by_head(b.k), w["self_attn.k_norm.weight"], by_head(b.k_rotated), b.rstd_k, eps_, s);
  rotate(call.ops, b.q_rotated, b.k_rotated, false, s);
}

void LlamaBlock::normalize_middle(const BlockForward& call, const LlamaBuffers& b) const {
  call.ops.rms_norm(b.x1, call.weights["post_attention_layernorm.weight"], b.norm2, b.rstd2, eps_, call.stream);
}

void LlamaBlock::forward(const BlockForward& call, std::size_t slot) {
  const LlamaBuffers& b = slots_.at(slot);
  const WeightsGuard& w = call.weights;
  Ops& ops = call.ops;
  const StreamView s = call.stream;
  normalize_input(call, b);
  project(call, b);
  ops.attention(heads(b.q_rotated), heads(b.k_rotated), heads(b.v), by_sequence(b.att), b.lse, attention_, s);
  ops.linear_add(b.att, w["self_attn.o_proj.weight"], {}, call.x, b.x1, s);
  normalize_middle(call, b);
  ops.linear(b.norm2, w["mlp.gate_proj.weight"], {}, b.gate, s);
  ops.linear(b.norm2, w["mlp.up_proj.weight"], {}, b.up, s);
  ops.swiglu(b.gate, b.up, b.act, s);
  if (!call.y) return;
  ops.linear_add(b.act, w["mlp.down_proj.weight"], {}, b.x1, call.y, s);
}

void LlamaBlock::complete(const BlockForward& call, std::size_t slot) {
  const LlamaBuffers& b = slots_.at(slot);
  normalize_input(call, b);
  if (config_.qk_norm) normalize_heads(call, b);
  normalize_middle(call, b);
  call.ops.swiglu(b.gate, b.up, b.act, call.stream);
}

void LlamaBlock::backward(const BlockBackward& call, std::size_t slot) {
  const LlamaBuffers& b = slots_.at(slot);
  mlp_backward(call, b);
  attention_backward(call, b);
  if (config_.qk_norm) qk_norm_backward(call, b);
  project_backward(call, b);
}

/// `dy` becomes the gradient of x1.
void LlamaBlock::mlp_backward(const BlockBackward& call, const LlamaBuffers& b) const {
  const auto& [ops, s, w, g, x, dy] = call;
  add_linear_gradients(call, dy, b.act, g["mlp.down_proj.weight"]);
  const TensorView dact = b.act;
  ops.linear_backward_input(dy, w["mlp.down_proj.weight"], dact, false, s);
  const TensorView dgate = b.gate;
  const TensorView dup = b.up;
  ops.swiglu_backward(dact, b.gate, b.up, dgate, dup, s);
  add_linear_gradients(call, dgate, b.norm2, g["mlp.gate_proj.weight"]);
  add_linear_gradients(call, dup, b.norm2, g["mlp.up_proj.weight"]);
  const TensorView dnorm2 = b.norm2;
  ops.linear_backward_input(dgate, w["mlp.gate_proj.weight"], dnorm2, false, s);
  ops.linear_backward_input(dup, w["mlp.up_proj.weight"], dnorm2, true, s);
  ops.rms_norm_backward(dnorm2, b.x1, w["post_attention_layernorm.weight"], b.rstd2, dy, true,
                        g["post_attention_layernorm.weight"], s);
}

/// From the gradient of x1 to those of q, k (before rotation) and v.
void LlamaBlock::attention_backward(const BlockBackward& call, const LlamaBuffers& b) const {
  const auto& [ops, s, w, g, x, dy] = call;
  add_linear_gradients(call, dy, b.att, g["self_attn.o_proj.weight"]);
  ops.linear_backward_input(dy, w["self_attn.o_proj.weight"], b.datt, false, s);
  ops.attention_backward(by_sequence(b.datt), heads(b.q_rotated), heads(b.k_rotated), heads(b.v), by_sequence(b.att),
                         b.lse, heads(b.dq), heads(b.dk), heads(b.dv), attention_, s);
  rotate(ops, b.dq, b.dk, true, s);
}

void LlamaBlock::qk_norm_backward(const BlockBackward& call, const LlamaBuffers& b) const {
  const auto& [ops, s, w, g, x, dy] = call;
  const TensorView dq = by_head(b.dq);
  const TensorView dk = by_head(b.dk);
  ops.rms_norm_backward(dq, by_head(b.q), w["self_attn.q_norm.weight"], b.rstd_q, dq, false,
                        g["self_attn.q_norm.weight"], s);
  ops.rms_norm_backward(dk, by_head(b.k), w["self_attn.k_norm.weight"], b.rstd_k, dk, false,
                        g["self_attn.k_norm.weight"], s);
}

/// `dy`, the gradient of x1, becomes the gradient of x.
void LlamaBlock::project_backward(const BlockBackward& call, const LlamaBuffers& b) const {
  const auto& [ops, s, w, g, x, dy] = call;
  add_linear_gradients(call, b.dq, b.norm1, g["self_attn.q_proj.weight"], bias(g, "self_attn.q_proj.bias"));
  add_linear_gradients(call, b.dk, b.norm1, g["self_attn.k_proj.weight"], bias(g, "self_attn.k_proj.bias"));
  add_linear_gradients(call, b.dv, b.norm1, g["self_attn.v_proj.weight"], bias(g, "self_attn.v_proj.bias"));
  const TensorView dnorm1 = b.norm1;
  ops.linear_backward_input(b.dq, w["self_attn.q_proj.weight"], dnorm1, false, s);
  ops.linear_backward_input(b.dk, w["self_attn.k_proj.weight"], dnorm1, true, s);
  ops.linear_backward_input(b.dv, w["self_attn.v_proj.weight"], dnorm1, true, s);
  ops.rms_norm_backward(dnorm1, x, w["input_layernorm.weight"], b.rstd1, dy, true, g["input_layernorm.weight"], s);
}

}  // namespace

std::unique_ptr<Block> make_llama_block(const ModelConfig& config, const RunShape& shape) {
  return std::make_unique<LlamaBlock>(config, shape);
}

}  // namespace tandem
