#pragma once
// One transformer block, forward and backward, over the ops of a device. A block knows its buffers and
// its mathematics; which layer it stands for, it learns with each call.
#include <cstddef>
#include <memory>
#include <string_view>

#include "core/device/device.hpp"
#include "core/memory/carver.hpp"
#include "core/ops/ops.hpp"
#include "core/params/parameter_access.hpp"
#include "models/transformer/products.hpp"
#include "models/transformer/transformer.hpp"

namespace tandem {

class ReferenceAdapters;

/// Place of a call's tokens in the cache of its layer.
struct CachedCall {
  KeyValueCache cache;
  CachedTokens tokens;
  bool decodes = false;  ///< tokens of one sequence each, few: none's bits depend on the others
};

/// Operands of a block's forward. Views are (N, C) in the compute type.
struct BlockForward {
  Ops& ops;
  StreamView stream;
  const WeightsGuard& weights;
  std::int64_t layer = 0;               ///< index among the blocks
  RecordsView records;                  ///< records of the rows of x
  TensorView x;                         ///< read
  TensorView y;                         ///< written, may be x; empty: only what backward needs is computed
  const CachedCall* cached = nullptr;   ///< set for a cached shape, whose x may have fewer rows than it; else null
  const std::uint64_t* draw = nullptr;  ///< number of the micro-batch, in training: dropout draws by it; else null
  const Fp8Buffers* fp8 = nullptr;      ///< set for eight-bit products; else null
  bool of_reference = false;            ///< forward of DPO's reference, which has adapters of its own, or none:
  const ReferenceAdapters* reference_adapters = nullptr;

  bool few_rows() const { return cached != nullptr && cached->decodes; }
};

struct BlockBackward {
  Ops& ops;
  StreamView stream;
  const WeightsGuard& weights;
  const GradientsGuard& gradients;
  std::int64_t layer = 0;  ///< index among the blocks
  RecordsView records;     ///< records of the rows of x
  TensorView x;            ///< the input of forward
  TensorView dy;           ///< gradient of the output; becomes the gradient of the input, in place
  std::uint64_t draw = 0;  ///< number of the micro-batch in training, by which dropout draws
  const Fp8Buffers* fp8 = nullptr;
};

class Block {
 public:
  Block() = default;
  virtual ~Block() = default;
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  /// Takes the buffers that all sets share, once and before any set. In a selective shape they are those that are not
  /// kept.
  virtual void take_shared(Carver& carver) = 0;
  /// Takes one more set of buffers, `slot` 0, 1, ...: what lies between forward and backward of a layer.
  virtual void take_buffers(Carver& carver) = 0;
  /// Takes constant tables.
  virtual void take_tables(Carver&) {}
  /// Writes them. Blocks until done.
  virtual void write_tables(Device&, StreamView) {}

  /// Asynchronous. Leaves in `slot` what backward needs (where the run trains).
  virtual void forward(const BlockForward& call, std::size_t slot) = 0;
  /// Asynchronous. Of a selective shape, where another slot's forward or backward came between: makes what `slot`
  /// lacks, by forward's operations on forward's values, and so to its bits. `call.y` is not written.
  virtual void complete(const BlockForward& call, std::size_t slot) = 0;
  /// Asynchronous. Adds to the gradients; the contents of `slot` are lost.
  virtual void backward(const BlockBackward& call, std::size_t slot) = 0;
};

/// A block of the config's family. Arguments are copied. `repeats_gelu`: what the ops say.
std::unique_ptr<Block> make_block(const ModelConfig& config, const RunShape& shape, bool repeats_gelu);
std::unique_ptr<Block> make_gpt2_block(const ModelConfig& config, const RunShape& shape, bool repeats_gelu);
std::unique_ptr<Block> make_llama_block(const ModelConfig& config, const RunShape& shape);

/// A guard's bias of that name, or an empty view where the layer has none.
template <class Guard>
TensorView bias_of(bool has, const Guard& guard, std::string_view name) {
  return has ? guard[name] : TensorView{};
}

/// Products whose factors are always taken as they are: those of adapters and routers. For few rows they read the
/// weight as it lies, see Ops::linear_rows.
void linear(const BlockForward& call, TensorView x, TensorView w, TensorView bias, TensorView y);

/// Projections of a block's tokens that attention takes.
struct Projections {
  HeadsView q, k, v;
};
/// Attention of forward, into out (B, T, H D): over the tokens of the call, or over their sequences in the cache, into
/// which their keys and values then go.
void attend(const BlockForward& call, const Projections& of, TensorView out, TensorView lse,
            const AttentionShape& shape);

/// The first rows of a buffer that may be empty.
inline TensorView first_rows(TensorView buffer, std::int64_t n) { return buffer ? buffer.rows(0, n) : buffer; }

/// Adds the parameter gradients of a linear layer, left out where all of them are frozen.
void add_linear_gradients(const BlockBackward& call, TensorView dy, TensorView x, TensorView dweight,
                          TensorView dbias = {});

}  // namespace tandem
