#pragma once
// Work of linear layers that multiply eight-bit factors, and which of them do not.
#include <string>
#include <vector>

#include "train/setup/module_work.hpp"

namespace tandem {

/// Turns the matrix products of a block's layers, as they count without, into products of eight-bit factors, and adds
/// what quantizing these takes. `again`: forward runs again in backward. Does nothing without shape.fp8.
void count_fp8(const ModelConfig& config, const RunShape& shape, bool again, LayerModules& modules);

/// Whether a parameter of the model is a weight of such a product, and of nothing else.
bool has_fp8_product(const ModelConfig& config, const RunShape& shape, const Parameter& parameter);

/// Linear layers of blocks that multiply their factors as they are for their sizes: "mlp.up_proj (41 x 32)". All, where
/// the number of tokens is no multiple of fp8_multiple. Empty without shape.fp8.
std::vector<std::string> fp8_exceptions(const ModelConfig& config, const RunShape& shape);

}  // namespace tandem
