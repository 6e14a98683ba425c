#pragma once
// Decoder-only transformers of the GPT-2 and Llama families over the ops of a device, forward and
// hand-written backward. A client of `ParameterAccess` like any other: it fetches each layer's weights
// when it needs them and commits each layer's gradients when they are complete.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/device/device.hpp"
#include "core/host/parallel.hpp"
#include "core/ops/ops.hpp"
#include "core/params/parameter_access.hpp"
#include "core/params/parameter_layout.hpp"
#include "models/config/config.hpp"
#include "models/transformer/input_store.hpp"

namespace tandem {

/// Layers, in forward order: the embedding, each block, the head (final norm and output weight). With a
/// tied head the output weight is tied to the token embedding. All weights (O, I), whatever the family. `products`: the
/// type of those gradients that are one matrix product, the weights' of the linear layers in blocks; `ends`: of those
/// of the token embedding and the output weight, as ends_gradient() has it. The adapters of a config that has any are
/// trained like the rest: what is frozen is the caller's to say.
ParameterLayout layout_of(const ModelConfig& config, DType products = DType::bf16, DType ends = DType::f32);

/// A linear layer of a block, by the name of its module: "self_attn.q_proj", whose weight is its parameter
/// "self_attn.q_proj.weight".
struct LinearLayer {
  std::string module;
  std::int64_t outputs = 0;  ///< O
  std::int64_t inputs = 0;   ///< I
  std::int64_t experts = 0;  ///< E, where it is of experts; else 0
};
/// Linear layers that every block has, in the order in which forward uses them. Without a router, which stays in bf16.
std::vector<LinearLayer> linear_layers(const ModelConfig& config);
/// The module that chooses experts, in a block of a mixture: its layer's outputs are logits of them.
constexpr const char* router_module = "mlp.gate";

/// How a Hugging Face tensor corresponds to a parameter. Parameters that share a tensor come one after another in the
/// layout, in the order of their rows. The weights of all experts, (E, O, I), are one parameter and E tensors.
struct HfTensor {
  std::string name;            ///< "transformer.h.0.attn.c_attn.weight", "model.layers.0.mlp.up_proj.weight"
  bool transposed = false;     ///< stored (I, O): GPT-2's Conv1D weights
  std::int64_t first_row = 0;  ///< tensor's row that is the parameter's first: for Phi-3's fused projections
  std::int64_t rows = 0;       ///< rows of the tensor
};
/// Whether a parameter is a matrix of an adapter.
bool is_adapter(const Parameter& parameter) noexcept;
/// Number of tensors that a parameter consists of, each an equal part of it: one, unless it is of experts.
std::int64_t hf_tensor_count(const Parameter& parameter) noexcept;
/// Tensor `index` of a parameter of the model itself, in their order; throws MisuseError on one of an adapter, of which
/// adapter_tensors() tells.
HfTensor hf_tensor_of(const ModelConfig& config, const Parameter& parameter, std::int64_t index = 0);

/// Writes the initial values of elements [first, first + values.size()) of one parameter: normal(0, initializer_range),
/// residual projections scaled by 1 / sqrt(2 layers), norms 1, biases 0. A function of seed, the parameter's full name
/// and index alone (counter-based), so that it does not depend on order, pieces or threads. Blocks, on `threads`; null:
/// on the caller's own.
void initialize_parameter(const ModelConfig& config, const Parameter& parameter, std::uint64_t seed, std::int64_t first,
                          std::span<float> values, Parallel* threads = nullptr);

/// Tokens that a run may keep at once, in all its micro-batches: far above any, low enough that no buffer's size
/// overflows 64 bits.
constexpr std::int64_t max_tokens = std::int64_t{1} << 24;

/// Products of linear layers whose inputs and weights are e4m3.
struct Fp8Products {
  Fp8Format gradients = Fp8Format::e4m3;  ///< format of the gradients of their outputs
  Fp8Accumulation accumulation = Fp8Accumulation::full;
  bool operator==(const Fp8Products&) const = default;
};

/// The shapes of one run; all memory is booked from them.
struct RunShape {
  std::int64_t batch = 1;     ///< B, sequences of a micro-batch
  std::int64_t sequence = 1;  ///< T
  /// Micro-batches kept at once: those that one call of `train` takes through each layer.
  std::int64_t micro_batches = 1;
  DType compute = DType::f32;          ///< type of activations
  std::optional<Fp8Products> fp8{};    ///< how linear layers of blocks multiply; none: factors as they are
  std::int64_t recomputed_blocks = 0;  ///< the first so many keep only their input: forward runs again in backward
  bool selective = false;       ///< the others keep what products and attention made: norms and activations run again
  bool training = true;         ///< false: forward only, nothing is kept
  bool offload_inputs = false;  ///< whether inputs wait on the host for backward; only where all blocks are computed
                                ///< again
  bool packed = false;          ///< sequences hold several records, and attention and positions stay within each
  /// Beta of direct preference optimization, whose loss is of pairs of sequences as PreferenceLoss has it: B is even.
  /// 0: the loss is of each target.
  float preference_beta = 0.0F;
  /// `train` computes the log-probabilities under the reference too, which is the model without its adapters: forward
  /// runs twice over the weights of each layer. It takes no memory of its own.
  bool reference_in_step = false;
  /// That reference has adapters of its own, which take memory: reference_adapters().
  bool reference_adapters = false;
  /// Positions of each of B rows of a cache of keys and values, for `decode` and nothing else, which takes at most T
  /// tokens of a sequence at once; 0: no cache.
  std::int64_t cached = 0;
};

/// Most tokens that a block of a cached shape takes at once.
constexpr std::int64_t most_cached_tokens(const RunShape& shape) noexcept {
  return shape.sequence > shape.batch ? shape.sequence : shape.batch;
}

/// Tokens that pass through a block together, over the cache.
struct CachedPart {
  std::int64_t tokens = 0;
  bool decodes = false;  ///< the next token of as many sequences; else the next tokens of one
};

/// The type of the gradients of token embedding and output weight for a shape's micro-batches: bf16, written whole,
/// where the gradients of all their logits take no more memory than that saves, and where a single sequence is so long
/// that they take more, and the weights are two; else f32. Where both are one table, the head writes all of it, and the
/// embedding the rows of its tokens once more, which are summed in f32.
DType ends_gradient(const ModelConfig& config, const RunShape& shape) noexcept;
/// Rows of a bf16 gradient of the output weight that are written at once, HeadLoss::rows_at_once: all, or, with more
/// tokens, so many that the gradients of their logits take half of the memory that this saves, no more than 256 MiB;
/// all logits are then computed once more.
std::int64_t head_rows_at_once(const ModelConfig& config, const RunShape& shape) noexcept;

/// Whether all of a tied table's gradient is made in the embedding's visit of backward, for which the head's logits are
/// computed once more, to the same bits. It is with several micro-batches at once, whose gradients would otherwise all
/// wait for it. Must equal the engine's OffloadOptions::owners_make_gradients.
bool makes_table_last(const ModelConfig& config, const RunShape& shape) noexcept;

/// Name of the treatment of activations until backward: "kept", "selectively recomputed", "8 of 24 blocks recomputed",
/// the latter also with ", others selectively", "recomputed", "recomputed, inputs offloaded".
std::string activations_of(const ModelConfig& config, const RunShape& shape);

/// One row of the model's own memory, for the plan.
struct ActivationEntry {
  std::string name;  ///< "batch", "activations, kept", "activations, offloaded", "activations, keys and values",
                     ///< "workspace", "tables"
  std::size_t bytes = 0;
  Place place = Place::device;
};

class ReferenceAdapters;

class Transformer {
 public:
  Transformer(ModelConfig config, RunShape shape);
  ~Transformer();
  Transformer(const Transformer&) = delete;
  Transformer& operator=(const Transformer&) = delete;

  const ModelConfig& config() const noexcept;
  const RunShape& shape() const noexcept;

  /// Rows of memory that `bind` will carve, each aligned to `arena_alignment`; allocates nothing. `ops` is asked for
  /// its workspace.
  std::vector<ActivationEntry> memory(const OpsRules& ops) const;
  /// Carves its buffers from `arena` (memory of `device`, at least the device's sum of `memory()`), allocates
  /// the pinned rows, writes constant tables through `stream`, lends the workspace to the device's ops. Blocks
  /// until done. `device` must outlive the model.
  void bind(Device& device, Arena& arena, StreamView stream);
  /// Computes with `ops`, which are of the same device, from now until `unbind`: they may watch each call and pass it
  /// on. They must outlive the model's use. Needs `bind` before, throws MisuseError.
  void compute_with(Ops& ops);
  /// Releases the memory that bind took; blocks until copies of its own are done. Call before the arena's memory goes.
  void unbind() noexcept;

  /// Traffic of block inputs that wait on the host, since bind.
  InputTraffic input_traffic() const noexcept;

  /// Device buffers (B, T) i32 of micro-batch `micro` that the caller fills (by a copy on the stream of the next call)
  /// before each call below: input tokens; targets, negative where not a target.
  TensorView tokens(std::int64_t micro = 0) const;
  TensorView targets(std::int64_t micro = 0) const;
  /// RecordsView::first and ::end of each token, (B, T) i32, which the caller fills likewise; empty where the shape is
  /// not packed. The first must be at most, and the end above, the token's own position.
  TensorView record_first(std::int64_t micro = 0) const;
  TensorView record_end(std::int64_t micro = 0) const;
  /// Number of a micro-batch of the next calls of `train` among all that the run trains: dropout draws by it.
  void set_draw(std::int64_t micro, std::uint64_t draw);
  /// Device buffers of a cached shape: for each token that `decode` takes its place in its part less its position in
  /// its sequence, as CachedTokens has it, and its sequence's row of the cache.
  TensorView cache_first() const;
  TensorView cache_rows() const;
  /// (B T) f32 on the device: loss of each target after `train` or `evaluate`.
  TensorView losses(std::int64_t micro = 0) const;
  /// Device buffers of a shape of preferences, else empty: log-probabilities of the sequences under the reference, (B)
  /// f32, which the caller fills as tokens, or with reference_in_step `train` itself; PreferenceLoss::pairs, (B / 2, 3)
  /// f32, after `train` or `evaluate`.
  TensorView reference(std::int64_t micro = 0) const;
  /// Device buffers that the caller fills before the first call; null: the reference has no adapters of its own.
  const ReferenceAdapters* reference_adapters() const noexcept;
  TensorView pairs(std::int64_t micro = 0) const;

  /// Forward and backward of micro-batches 0 ... n - 1, at most shape().micro_batches; gradients are of
  /// gradient_scale * sum(losses), of targets or of pairs. Asynchronous on `stream`. Needs shape().training. Fetches
  /// layers 0 ... L + 1, then L ... 1, and 0 where makes_table_last() and it has a gradient, once each: a guard serves
  /// all micro-batches. Asks for gradients of L + 1 ... 0, n times in a row each, also where all of a layer is frozen.
  void train(ParameterAccess& parameters, float gradient_scale, StreamView stream, std::int64_t n = 1);
  /// Forward of micro-batch 0 with losses; nothing else is kept. Asynchronous.
  void evaluate(ParameterAccess& parameters, StreamView stream);
  /// Forward, then logits (V) f32 of position `position` of sequence 0, into device memory that the
  /// model owns. Asynchronous.
  TensorView logits(ParameterAccess& parameters, std::int64_t position, StreamView stream);
  /// Forward of the first tokens of `tokens()`, part after part, over the cache, which then has their keys and values.
  /// Earlier positions of their sequences must be there. A part has at most T tokens of one sequence, or B that each
  /// have their own. Returns logits (R, V) f32, at most B rows, in device memory that the model owns: of each token of
  /// a part that decodes, of the last of one that does not. Fetches layers 0 ... L + 1 once each, for all parts. The
  /// bits of a part do not depend on the others; those of a token in a part that decodes depend on its sequence alone.
  /// Asynchronous. Needs a cached shape, throws MisuseError.
  TensorView decode(ParameterAccess& parameters, std::span<const CachedPart> parts, StreamView stream);
  /// Positions that `decode` has computed since bind.
  std::int64_t decoded_positions() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Positions that a token sees on average, itself among them, of a sequence: (T + 1) / 2, or fewer with a window; 0:
/// none.
double positions_seen(std::int64_t sequence, std::int64_t window) noexcept;

}  // namespace tandem
