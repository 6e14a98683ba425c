#pragma once
// Linear layers of a block, with factors as they are or, in a shape with eight-bit products, quantized: each whole, by
// its own largest magnitude. Head, router, experts and adapters have none.
#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/memory/carver.hpp"
#include "core/ops/ops.hpp"
#include "models/transformer/transformer.hpp"

namespace tandem {

struct BlockForward;
struct BlockBackward;

/// Layers of a block that take one input, at most.
constexpr std::size_t most_linear_outputs = 3;

/// Magnitudes (MeasuredView) of the inputs of a block's linear layers, kept from forward to backward, where the same
/// inputs are quantized again. All null without eight-bit products.
struct InputMagnitudes {
  void* attention = nullptr;  ///< input of query, key and value
  void* output = nullptr;     ///< attention's result
  void* mlp = nullptr;        ///< input of gate and up, or of the MLP's first layer
  void* down = nullptr;       ///< activation
};

/// Gradients that the backward of an activation makes, at most: of gate and up.
constexpr std::size_t most_activation_inputs = 2;

/// Memory that quantized factors of a block lie in, one use after another.
struct Fp8Buffers {
  Fp8Products how;
  void* input = nullptr;
  void* weight = nullptr;
  std::array<void*, most_linear_outputs> gradients{};  ///< gradients of the outputs of layers that take one input
  /// Magnitudes of gradients that the backward of an activation has written.
  std::array<void*, most_activation_inputs> gradient_magnitudes{};
  std::vector<InputMagnitudes> inputs{};  ///< by slots of the block's buffers
};

/// Bytes of each of them.
struct Fp8Sizes {
  std::size_t input = 0, weight = 0, magnitude = 0;
  std::array<std::size_t, most_linear_outputs> gradients{};
};
/// Sizes for the linear layers of a config's blocks; zeros where the shape has no eight-bit products.
Fp8Sizes fp8_sizes(const ModelConfig& config, const RunShape& shape, const OpsRules& ops);
/// Takes them; nothing where all are zero.
std::optional<Fp8Buffers> take_fp8(Carver& carver, const Fp8Sizes& sizes, const RunShape& shape);
/// Takes the magnitudes of one more slot, where there are eight-bit products.
void take_magnitudes(Carver& carver, const Fp8Sizes& sizes, std::optional<Fp8Buffers>& buffers);

/// Magnitudes of a slot's inputs, and memory for those of gradients; null without eight-bit products.
InputMagnitudes input_magnitudes(const Fp8Buffers* buffers, std::size_t slot);
void* gradient_magnitude(const Fp8Buffers* buffers, std::size_t place);
/// x with a magnitude that is written here: x comes from what writes none. Without memory for it, or where the sizes
/// of x allow no product, x alone.
MeasuredView measured(const BlockForward& call, TensorView x, void* magnitude);

/// Input of one or several linear layers, which it is quantized for once.
struct LinearInput {
  TensorView values;    ///< (N, I)
  Fp8Matrix quantized;  ///< no data: products take the values
};
/// Input of a linear layer in forward; the memory of an earlier input is taken over. x with its magnitude, if known.
LinearInput linear_input(const BlockForward& call, MeasuredView x);
/// Input of a linear layer in backward, for the gradients of weights; quantized only where `wanted`.
LinearInput linear_input(const BlockBackward& call, MeasuredView x, bool wanted);

/// y = x w^T + bias, and variants, as Ops has them. For few rows they read the weight as it lies, see Ops::linear_rows.
void linear(const BlockForward& call, const LinearInput& x, TensorView w, TensorView bias, TensorView y);
void linear_add(const BlockForward& call, const LinearInput& x, TensorView w, TensorView bias, TensorView residual,
                TensorView y);
void linear_gelu(const BlockForward& call, const LinearInput& x, TensorView w, TensorView bias, TensorView up,
                 MeasuredView act);

/// Gradient of a linear layer's output.
struct LinearGradient {
  TensorView values;    ///< (N, O)
  Fp8Matrix quantized;  ///< no data: products take the values
};
/// Quantizes dy into the memory of output `place` of those that take one input; what was there is lost.
LinearGradient linear_gradient(const BlockBackward& call, MeasuredView dy, std::size_t place = 0);

/// Gradients of a linear layer's parameters, left out where they are frozen.
void add_linear_gradients(const BlockBackward& call, const LinearGradient& dy, const LinearInput& x, TensorView dweight,
                          TensorView dbias = {});
/// dx = dy w, or +=, as Ops has it.
void linear_backward_input(const BlockBackward& call, const LinearGradient& dy, TensorView w, TensorView dx,
                           bool accumulate);
void linear_gelu_backward_input(const BlockBackward& call, const LinearGradient& dy, TensorView w, TensorView up,
                                MeasuredView dup);

}  // namespace tandem
