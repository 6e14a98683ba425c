#pragma once
// One residual block, y = x + w2 relu(w1 x + b1), for a batch of columns. Activations are (features, batch),
// fp32, so that every inner loop runs over the batch; matrices are (out, in), bf16, and the bias is fp32.
#include <cstddef>
#include <span>
#include <vector>

#include <tandem/tandem.hpp>

namespace mlp {

constexpr int width = 352;
constexpr int hidden = 4 * width;
constexpr int batch = 16;

/// Weights or gradients of one block.
template <class Matrix, class Vector>
struct Block {
  Matrix* w1;  // (hidden, width)
  Vector* b1;  // (hidden)
  Matrix* w2;  // (width, hidden)
};
using Weights = Block<const tandem::bf16, const float>;
using Gradients = Block<float, float>;

/// Memory of one block's forward that its backward reads.
struct Saved {
  float* x;  // (width, batch): the block's input
  float* h;  // (hidden, batch): after the ReLU
};

/// Writes h and y (width, batch).
void forward(Weights weights, Saved saved, float* y);

/// Given dy (width, batch), adds to the gradients and turns dy into dx, in place. `dh` (hidden, batch) is scratch.
void backward(Weights weights, Saved saved, Gradients gradients, float* dy, float* dh);

/// Mean squared error of y against the targets, both (width, batch); writes its gradient times `scale` to dy.
double squared_error(const float* y, const float* targets, float scale, float* dy);

}  // namespace mlp
