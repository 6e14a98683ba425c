#include "models/transformer/block.hpp"

namespace tandem {

std::unique_ptr<Block> make_block(const ModelConfig& config, const RunShape& shape, bool repeats_gelu) {
  return config.family == Family::gpt2 ? make_gpt2_block(config, shape, repeats_gelu) : make_llama_block(config, shape);
}

void linear(const BlockForward& call, TensorView x, TensorView w, TensorView bias, TensorView y) {
  if (call.few_rows()) return call.ops.linear_rows(x, w, bias, y, call.stream);
  call.ops.linear(x, w, bias, y, call.stream);
}

void attend(const BlockForward& call, const Projections& of, TensorView out, TensorView lse,
            const AttentionShape& shape) {
  if (call.cached == nullptr) return call.ops.attention(of.q, of.k, of.v, out, lse, shape, call.stream);
  const auto& [cache, tokens, decodes] = *call.cached;
  call.ops.store_keys_values(of.k, of.v, cache, tokens, shape, call.stream);
  call.ops.cached_attention(of.q, cache, tokens, out.reshaped({out.shape[0] * out.shape[1], out.shape[2]}), shape,
                            call.stream);
}

void add_linear_gradients(const BlockBackward& call, TensorView dy, TensorView x, TensorView dweight,
                          TensorView dbias) {
  if (dweight || dbias) call.ops.linear_backward_weight(dy, x, dweight, dbias, call.stream);
}

}  // namespace tandem
