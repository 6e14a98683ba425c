#pragma once
// The MLP of a block of the Llama family: down(silu(gate) * up), or with GELU in place of SiLU, once, or of experts of
// which every token takes some.
#include <memory>

#include "core/memory/carver.hpp"
#include "models/transformer/adapters.hpp"
#include "models/transformer/block.hpp"

namespace tandem {

/// R is N, or N K with experts: of each token as many rows as it has experts. In backward, gradients take the place of
/// what they have used up.
struct MlpBuffers {
  TensorView gate, up;            ///< (R, F); backward: their gradients
  TensorView act;                 ///< (R, F), of all blocks in a selective shape; backward: its gradient
  TensorView logits;              ///< (N, E) f32, of the experts
  void* act_magnitude = nullptr;  ///< magnitude of act in forward, see InputMagnitudes
  Routing routing;
  // Shared by all blocks, in use within a call.
  TensorView rows;              ///< (N K, C): outputs of experts, or the gradients of their inputs
  TensorView dlogits;           ///< (N, E)
  TensorView drouting_weights;  ///< (N, K) f32
};

class Mlp {
 public:
  Mlp() = default;
  virtual ~Mlp() = default;
  Mlp(const Mlp&) = delete;
  Mlp& operator=(const Mlp&) = delete;

  /// Takes buffers that all blocks share, as Block::take_shared.
  virtual void take_shared(Carver& carver, MlpBuffers& b) const = 0;
  /// Takes buffers between forward and backward, in a copy of what take_shared() took.
  virtual void take(Carver& carver, MlpBuffers& b) const = 0;

  /// Buffers of forward for the first `n` tokens.
  virtual MlpBuffers first_tokens(MlpBuffers b, std::int64_t n) const = 0;

  /// Computes the MLP of x (N, C) up to the activation. A magnitude of x has been written.
  virtual void forward(const BlockForward& call, MeasuredView x, const MlpBuffers& b,
                       const AdapterBuffers& a) const = 0;
  /// Computes the activation alone, again.
  virtual void activate(const BlockForward& call, const MlpBuffers& b) const = 0;
  /// y (N, C) = the MLP's result, after forward(); plus `residual` where that is not empty. With an empty y only what
  /// backward needs is computed.
  virtual void finish(const BlockForward& call, const MlpBuffers& b, const AdapterBuffers& a, TensorView residual,
                      TensorView y) const = 0;
  /// Computes dx, the gradient of x, from dy, that of the result; dx is written or, where `accumulate`, added to. It
  /// may take the place of x. Adds to the gradients of the weights.
  virtual void backward(const BlockBackward& call, TensorView dy, MeasuredView x, const MlpBuffers& b,
                        const AdapterBuffers& a, TensorView dx, bool accumulate) const = 0;
};

/// The MLP that the config asks for. `adapters`, those of the block, must outlive it; other arguments are copied.
std::unique_ptr<Mlp> make_mlp(const ModelConfig& config, const RunShape& shape, const Adapters& adapters);

}  // namespace tandem
