#pragma once
// Work of a model's step by kinds of modules, and its time and bound on a machine.
#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "models/transformer/transformer.hpp"
#include "scheduler/machine/cost_model.hpp"
#include "train/config/config.hpp"

namespace tandem {

/// Modules of which a model is made. The sum with the residual counts as the module's whose output it adds, the
/// rotation of queries and keys as attention's.
enum class ModuleKind : std::uint8_t {
  embedding,
  norms,      ///< norms of blocks, of queries and keys, and the one before the head
  qkv,        ///< projections to queries, keys and values
  attention,  ///< without its projections
  output,     ///< projection of attention's output
  mlp,
  experts,
  router,
  head,      ///< output weight and loss
  adapters,  ///< low-rank adapters of any layer
  decoding,  ///< weights in other formats, made bf16 for a use of their layer
};
constexpr std::size_t module_kinds = 11;
/// "embedding", "output projection".
std::string_view name_of(ModuleKind kind) noexcept;
/// Kind of a block's linear layer, by the name of its module: "self_attn.q_proj".
ModuleKind kind_of_linear(std::string_view module) noexcept;

/// Work of each kind of module in one layer, by ModuleKind. Blocks have norms, attention and so on, the first layer the
/// embedding, the last one the head and the norm before it; the head's part of a tied table may be the first's.
using LayerModules = std::array<LayerWork, module_kinds>;
/// Work of a micro-batch: `work_of` is its sum over the kinds. Arguments as there.
std::vector<LayerModules> module_work_of(const ModelConfig& config, const RunShape& shape,
                                         const SequenceFacts& sequences = {}, const ParameterLayout* layout = nullptr);
/// Adds up two parts of a layer's work.
void add(LayerWork& to, const LayerWork& more) noexcept;

}  // namespace tandem
