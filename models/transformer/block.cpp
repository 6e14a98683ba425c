#include "models/transformer/block.hpp"

namespace tandem {

std::unique_ptr<Block> make_block(const ModelConfig& config, const RunShape& shape, bool repeats_gelu) {
  return config.family == Family::gpt2 ? make_gpt2_block(config, shape, repeats_gelu) : make_llama_block(config, shape);
}

void add_linear_gradients(const BlockBackward& call, TensorView dy, TensorView x, TensorView dweight,
                          TensorView dbias) {
  if (dweight || dbias) call.ops.linear_backward_weight(dy, x, dweight, dbias, call.stream);
}

}  // namespace tandem
