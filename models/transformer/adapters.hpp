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
  TensorView sum, addend;        ///< (R, r) of the largest, of all blocks; empty where no layers share A: backward: the
                                 ///< gradient of `down` so far, and one layer's part of it
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

  /// Whether a linear layer that is a module by itself has an adapter.
  bool has(std::int64_t block, std::string_view layer) const { return lora_ && lora_->adapts(block, layer); }

  // Each of these does nothing where the layer has no adapter, or the call goes without. `x`, `y`: the layer's input and
  // output. Layers that share A are called in their order, with one x.
  /// y += scale (x A^T) B^T; with an empty y only what backward needs is computed.
  void forward(const BlockForward& call, std::string_view layer, TensorView x, TensorView y,
               const AdapterBuffers& b) const;
  /// The gradients of A and B.
  void parameter_gradients(const BlockBackward& call, std::string_view layer, TensorView dy, TensorView x,
                           const AdapterBuffers& b) const;
  /// dx += the adapter's part, after parameter_gradients(): of layers that share A with the first call, after those of
  /// all.
  void input_gradient(const BlockBackward& call, std::string_view layer, TensorView dx, const AdapterBuffers& b) const;

  // Calls for the experts' layers, whose rows `routing` assigns.
  void expert_forward(const BlockForward& call, std::string_view layer, RowValues x, const Routing& routing,
                      TensorView y, const AdapterBuffers& b) const;
  void expert_parameter_gradients(const BlockBackward& call, std::string_view layer, RowValues dy, RowValues x,
                                  const Routing& routing, const AdapterBuffers& b) const;
  void expert_input_gradient(const BlockBackward& call, std::string_view layer, const Routing& routing, TensorView dx,
                             const AdapterBuffers& b) const;

 private:
  /// A module with an adapter in some block.
  struct Adapter {
    std::string module, a;               ///< names of the module and of its parameter A
    std::vector<std::string> layers, b;  ///< names of its linear layers, and of their parameters B
    std::int64_t rows = 0;               ///< R of a batch
    std::int64_t choices = 1;            ///< R of a token
    std::int64_t inputs = 0;             ///< I
    std::int64_t rank = 0;               ///< largest of any block
  };
  /// An adapter of a block and its buffer, for one of its layers; none where the layer has no adapter.
  struct Use {
    const Adapter* adapter = nullptr;
    std::size_t layer = 0;
    TensorView down;
    float scale = 0.0F;
    explicit operator bool() const noexcept { return adapter != nullptr; }
    bool is_first() const noexcept { return layer == 0; }
    bool is_last() const noexcept { return layer + 1 == adapter->layers.size(); }
    const std::string& a() const noexcept { return adapter->a; }
    const std::string& b() const noexcept { return adapter->b[layer]; }
  };
  Use use(std::int64_t block, std::string_view layer, const AdapterBuffers& b) const;
  /// Has `product` write one layer's part of the gradient of `down`; whether it was the last, and `down` has it all.
  template <class Product>
  bool gather(const BlockBackward& call, const Use& use, const AdapterBuffers& b, const Product& product) const;
  /// Whether a call goes without adapters.
  static bool without(const BlockForward& call) noexcept {
    return call.of_reference && call.reference_adapters == nullptr;
  }
  bool drops() const { return lora_ && lora_->dropout > 0.0; }
  Dropout dropout(std::int64_t block, const Adapter& adapter, std::uint64_t draw) const;

  std::optional<LoraConfig> lora_;
  DType compute_;
  bool training_;
  std::int64_t tokens_;
  std::vector<Adapter> adapters_;
};

}  // namespace tandem
