// Output layer and cross-entropy over chunks of rows: only one chunk's logits exist at a time, and their
// gradient takes their place.
#include <cmath>
#include <limits>

#include "core/numerics/functions.hpp"
#include "cpu_ops/elements.hpp"
#include "cpu_ops/kernels.hpp"

namespace tandem::fast {
namespace {

/// Bytes of logits at once: enough rows that the products are worth their conversion of the weights, few
/// enough to stay far below the weights themselves.
constexpr std::int64_t most_logits = 26 * 1000 * 1000 / 4;

struct SoftmaxRow {
  float* logits;      ///< (V); replaced by gradients where asked for
  std::int64_t size;  ///< V
  std::int32_t target;
  float gradient_scale;
  bool gradient;
};

/// Returns the loss of one row.
float softmax_row(const SoftmaxRow& row) {
  float* const x = row.logits;
  const std::int64_t n = row.size;
  if (row.target < 0) {
    if (row.gradient) std::fill(x, x + n, 0.0F);
    return 0.0F;
  }
  const float target_logit = x[row.target];
  float largest = 0.0F, sum = 0.0F;
  float* const results[2] = {&largest, &sum};
  vectorised([=] {
    const float top = lane_max(n, -std::numeric_limits<float>::infinity(), [=](std::int64_t i) { return x[i]; });
#pragma GCC ivdep
    for (std::int64_t i = 0; i < n; ++i) x[i] = numerics::exp(x[i] - top);
    *results[0] = top;
    *results[1] = lane_sum(n, [=](std::int64_t i) { return x[i]; });
  });
  if (row.gradient) {
    const float factor = row.gradient_scale / sum;
    vectorised([=] {
#pragma GCC ivdep
      for (std::int64_t i = 0; i < n; ++i) x[i] = x[i] * factor;
    });
    x[row.target] -= row.gradient_scale;
  }
  return static_cast<float>(std::log(static_cast<double>(sum)) + static_cast<double>(largest) -
                            static_cast<double>(target_logit));
}

void check_targets(const std::int32_t* targets, std::int64_t n, std::int64_t vocabulary) {
  for (std::int64_t i = 0; i < n; ++i) {
    if (targets[i] >= vocabulary) {
      throw MisuseError("head_loss: target not below the vocabulary", std::to_string(targets[i]));
    }
  }
}

/// The weight's gradient once more, of the rows that tokens name and in fp32: one product of those columns of all
/// logits' gradients.
void make_token_rows(Parallel& parallel, const Workspace& workspace, const HeadLoss& head,
                     const TensorView& gradients) {
  const std::int64_t n = gradients.shape[0], vocabulary = gradients.shape[1];
  const TensorView columns{workspace.data, DType::f32, {n, n}};
  const std::int32_t* const tokens = head.tokens.as<std::int32_t>();
  parallel.run(n, [&](std::int64_t row) {
    const float* const from = gradients.as<float>() + row * vocabulary;
    float* const to = columns.as<float>() + row * n;
    for (std::int64_t i = 0; i < n; ++i) to[i] = from[tokens[i]];
  });
  std::fill_n(head.token_rows.as<float>(), head.token_rows.count(), 0.0F);
  linear_backward_weight(parallel, workspace.after(columns.bytes()), columns, head.x, head.token_rows, {});
}

}  // namespace

std::int64_t head_loss_rows(std::int64_t tokens, std::int64_t vocabulary) {
  const std::int64_t most = std::max<std::int64_t>(1, most_logits / std::max<std::int64_t>(1, vocabulary));
  return Blocks(tokens, most).size;
}

std::size_t head_loss_scratch(std::int64_t tokens, std::int64_t channels, std::int64_t vocabulary, DType activations,
                              int threads, bool whole, bool token_rows) {
  // The even split of fewer tokens may give larger chunks, so the bound for up to `tokens` is not their own chunk.
  const std::int64_t most = std::max<std::int64_t>(1, most_logits / std::max<std::int64_t>(1, vocabulary));
  const std::int64_t rows = whole ? tokens : std::min(tokens, most);
  const std::size_t columns = whole && token_rows ? Scratch::bytes_of(tokens * tokens) : 0;
  const std::int64_t outputs = columns > 0 ? std::max(vocabulary, tokens) : vocabulary;
  return Scratch::bytes_of(rows * vocabulary) + columns + linear_scratch(rows, channels, outputs, activations, threads);
}

void head_loss(Parallel& parallel, const Workspace& workspace, const HeadLoss& head) {
  const std::int64_t n = head.x.shape[0], vocabulary = head.weight.shape[0];
  const std::int32_t* const targets = head.targets.as<std::int32_t>();
  float* const losses = head.losses.as<float>();
  const bool gradient = head.gradients();
  check_targets(targets, n, vocabulary);
  if (head.tokens) check_tokens("head_loss", head.tokens, vocabulary);
  const std::int64_t at_once = head_loss_rows(n, vocabulary);
  // What is written whole is one product over all rows.
  const bool whole = head.writes_weight();
  const std::int64_t kept = whole ? n : at_once;
  const Workspace rest = workspace.after(Scratch::bytes_of(kept * vocabulary));
  const TensorView all{workspace.data, DType::f32, {kept, vocabulary}};
  for (std::int64_t begin = 0; begin < n; begin += at_once) {
    const std::int64_t end = std::min(n, begin + at_once);
    const TensorView logits = whole ? all.rows(begin, end) : all.rows(0, end - begin);
    linear(parallel, rest, head.x.rows(begin, end), head.weight, {}, logits);
    parallel.run(end - begin, [&](std::int64_t row) {
      losses[begin + row] = softmax_row({.logits = logits.as<float>() + row * vocabulary,
                                         .size = vocabulary,
                                         .target = targets[begin + row],
                                         .gradient_scale = head.gradient_scale,
                                         .gradient = gradient});
    });
    if (!gradient) continue;
    if (head.dx) linear_backward_input(parallel, rest, logits, head.weight, head.dx.rows(begin, end), false);
    if (!head.dweight || whole) continue;
    linear_backward_weight(parallel, rest, logits, head.x.rows(begin, end), head.dweight, {});
  }
  if (whole) linear_backward_weight(parallel, rest, all, head.x, head.dweight, {});
  if (head.token_rows) make_token_rows(parallel, rest, head, all);
}

}  // namespace tandem::fast
