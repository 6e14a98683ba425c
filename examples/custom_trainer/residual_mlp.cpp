#include "residual_mlp.hpp"

#include <algorithm>

namespace mlp {
namespace {

using tandem::bf16;
using tandem::numerics::bf16_to_float;

/// y (out, batch) += w (out, in) x (in, batch)
void multiply(const bf16* w, const float* x, float* y, int out, int in) {
  for (int o = 0; o < out; ++o) {
    float* row = y + o * batch;
    for (int i = 0; i < in; ++i) {
      const float weight = bf16_to_float(w[o * in + i]);
      for (int b = 0; b < batch; ++b) row[b] += weight * x[i * batch + b];
    }
  }
}

/// dx (in, batch) += w^T dy
void multiply_transposed(const bf16* w, const float* dy, float* dx, int out, int in) {
  for (int o = 0; o < out; ++o) {
    const float* row = dy + o * batch;
    for (int i = 0; i < in; ++i) {
      const float weight = bf16_to_float(w[o * in + i]);
      for (int b = 0; b < batch; ++b) dx[i * batch + b] += weight * row[b];
    }
  }
}

/// dw (out, in) += dy x^T, with x turned first so that the inner loop runs along a row of dw.
void add_outer_product(const float* dy, const float* x, float* dw, int out, int in) {
  std::vector<float> turned(static_cast<std::size_t>(batch * in));
  for (int b = 0; b < batch; ++b) {
    float* row = turned.data() + b * in;
    for (int i = 0; i < in; ++i) row[i] = x[i * batch + b];
  }
  for (int o = 0; o < out; ++o) {
    float* row = dw + o * in;
    for (int b = 0; b < batch; ++b) {
      const float scale = dy[o * batch + b];
      const float* column = turned.data() + b * in;
      for (int i = 0; i < in; ++i) row[i] += scale * column[i];
    }
  }
}

}  // namespace

void forward(Weights weights, Saved saved, float* y) {
  for (int o = 0; o < hidden; ++o) std::fill_n(saved.h + o * batch, batch, weights.b1[o]);
  multiply(weights.w1, saved.x, saved.h, hidden, width);
  for (int i = 0; i < hidden * batch; ++i) saved.h[i] = std::max(saved.h[i], 0.0F);
  std::copy_n(saved.x, width * batch, y);
  multiply(weights.w2, saved.h, y, width, hidden);
}

void backward(Weights weights, Saved saved, Gradients gradients, float* dy, float* dh) {
  add_outer_product(dy, saved.h, gradients.w2, width, hidden);
  std::fill_n(dh, hidden * batch, 0.0F);
  multiply_transposed(weights.w2, dy, dh, width, hidden);
  for (int i = 0; i < hidden * batch; ++i) dh[i] = saved.h[i] > 0.0F ? dh[i] : 0.0F;
  for (int o = 0; o < hidden; ++o) {
    for (int b = 0; b < batch; ++b) gradients.b1[o] += dh[o * batch + b];
  }
  add_outer_product(dh, saved.x, gradients.w1, hidden, width);
  multiply_transposed(weights.w1, dh, dy, hidden, width);  // the residual path: dx = dy + w1^T dh
}

double squared_error(const float* y, const float* targets, float scale, float* dy) {
  double sum = 0.0;
  constexpr int count = width * batch;
  for (int i = 0; i < count; ++i) {
    const float difference = y[i] - targets[i];
    sum += static_cast<double>(difference) * difference;
    dy[i] = scale * 2.0F * difference / static_cast<float>(count);
  }
  return sum / count;
}

}  // namespace mlp
