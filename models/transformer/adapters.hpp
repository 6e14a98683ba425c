#pragma once
// Low-rank adapters of a block's linear layers, beside whose products theirs are computed: the sum of both matrices is
// never formed, and backward needs no gradient of the frozen one.
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/memory/carver.hpp"
#include "models/transformer/block.hpp"

namespace tandem {

/// Buffers of a block's adapters; those of a slot lie in a copy of what take_shared() took.
struct AdapterBuffers {
  std::vector<TensorView> down;  ///< (R, r) for each adapter: scale x A^T; backward: its gradient
  TensorView wide;               ///< (N, I) of the widest layer, of all blocks; empty without dropout: x with elements
                                 ///< dropped, and in backward the gradient of that
};

class Adapters {
 public:
  Adapters(const ModelConfig& config, const RunShape& shape);

  /// Takes buffers that all blocks share.
  void take_shared(Carver& carver, AdapterBuffers& b) const;
  /// Takes buffers between forward and backward.
  void take(Carver& carver, AdapterBuffers& b) const;
  /// Buffers of forward for the first `n` tokens.
  AdapterBuffers first_tokens(AdapterBuffers b, std::int64_t n) const;

  /// Whether that linear layer of a block has an adapter.
  bool has(std::int64_t block, std::string_view module) const { return lora_ && lora_->adapts(block, module); }

  // Each of these does nothing where the layer has no adapter, or the call goes without. `x`, `y`: the layer's input
  // and output.
  /// y += scale (x A^T) B^T; with an empty y only what backward needs is computed.
  void forward(const BlockForward& call, std::string_view module, TensorView x, TensorView y,
               const AdapterBuffers& b) const;
  /// The gradients of A and B.
  void parameter_gradients(const BlockBackward& call, std::string_view module, TensorView dy, TensorView x,
                           const AdapterBuffers& b) const;
  /// dx += the adapter's part, after parameter_gradients().
  void input_gradient(const BlockBackward& call, std::string_view module, TensorView dx, const AdapterBuffers& b) const;

  // Calls for the experts' layers, whose rows `routing` assigns.
  void expert_forward(const BlockForward& call, std::string_view module, RowValues x, const Routing& routing,
                      TensorView y, const AdapterBuffers& b) const;
  void expert_parameter_gradients(const BlockBackward& call, std::string_view module, RowValues dy, RowValues x,
                                  const Routing& routing, const AdapterBuffers& b) const;
  void expert_input_gradient(const BlockBackward& call, std::string_view module, const Routing& routing, TensorView dx,
                             const AdapterBuffers& b) const;

 private:
  /// A layer with an adapter in some block.
  struct Adapter {
    std::string module, a, b;  ///< names of the module and its parameters
    std::int64_t rows = 0;     ///< R of a batch
    std::int64_t choices = 1;  ///< R of a token
    std::int64_t inputs = 0;   ///< I
  };
  /// An adapter and its buffer; none where the layer has no adapter.
  struct Use {
    const Adapter* adapter = nullptr;
    TensorView down;
    explicit operator bool() const noexcept { return adapter != nullptr; }
  };
  Use use(std::int64_t block, std::string_view module, const AdapterBuffers& b) const;
  bool drops() const { return lora_ && lora_->dropout > 0.0; }
  Dropout dropout(std::int64_t block, const Adapter& adapter, std::uint64_t draw) const;
  void scale(Ops& ops, TensorView down, StreamView stream) const;

  std::optional<LoraConfig> lora_;
  DType compute_;
  std::int64_t tokens_;
  std::vector<Adapter> adapters_;
};

}  // namespace tandem
