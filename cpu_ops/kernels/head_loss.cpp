// Output layer and cross-entropy over chunks of rows: only one chunk's logits exist at a time, and their
// gradient takes their place.
#include <cmath>
#include <limits>

#include "core/numerics/functions.hpp"
#include "cpu_ops/kernels/elements.hpp"
#include "cpu_ops/kernels/kernels.hpp"
#include "cpu_ops/kernels/lane_sums.hpp"

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

/// Statistics of a row of logits, from which its gradients follow.
struct RowScale {
  float largest;
  float factor;  ///< multiplies exp(logit - largest)
};

struct RowLoss {
  float loss;
  RowScale scale;
};

RowLoss softmax_row(const SoftmaxRow& row) {
  float* const x = row.logits;
  const std::int64_t n = row.size;
  if (row.target < 0) {
    if (row.gradient) std::fill(x, x + n, 0.0F);
    return {};
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
  const float factor = row.gradient_scale / sum;
  if (row.gradient) {
    vectorised([=] {
#pragma GCC ivdep
      for (std::int64_t i = 0; i < n; ++i) x[i] = x[i] * factor;
    });
    x[row.target] -= row.gradient_scale;
  }
  return {static_cast<float>(std::log(static_cast<double>(sum)) + static_cast<double>(largest) -
                             static_cast<double>(target_logit)),
          {largest, factor}};
}

/// Some of a row's logits, again, become gradients: the bits that softmax_row() makes of them. `target`: among them.
void gradient_row(const SoftmaxRow& row, const RowScale& scale) {
  float* const x = row.logits;
  if (scale.factor == 0.0F) {
    std::fill(x, x + row.size, 0.0F);
  } else {
    vectorised([=] {
#pragma GCC ivdep
      for (std::int64_t i = 0; i < row.size; ++i) x[i] = numerics::exp(x[i] - scale.largest) * scale.factor;
    });
  }
  if (row.target >= 0 && row.target < row.size) x[row.target] -= row.gradient_scale;
}

/// Scale of the gradients of a row's loss.
float gradient_scale_of(const HeadLoss& head, std::int64_t row) {
  if (!head.sequence_factors) return head.gradient_scale;
  const std::int64_t sequence = row / (head.x.shape[0] / head.sequence_factors.shape[0]);
  return head.gradient_scale * head.sequence_factors.as<float>()[sequence];
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

/// The weight's gradient, some of its rows at a time: of all rows of logits those columns once more.
void write_in_slices(Parallel& parallel, const Workspace& workspace, const HeadLoss& head, const RowScale* scales) {
  const std::int64_t n = head.x.shape[0], vocabulary = head.weight.shape[0];
  const std::int32_t* const targets = head.targets.as<std::int32_t>();
  for (std::int64_t begin = 0; begin < vocabulary; begin += head.rows_at_once) {
    const std::int64_t end = std::min(vocabulary, begin + head.rows_at_once), size = end - begin;
    const TensorView gradients{workspace.data, DType::f32, {n, size}};
    const Workspace rest = workspace.after(gradients.bytes());
    linear(parallel, rest, head.x, head.weight.rows(begin, end), {}, gradients);
    parallel.run(n, [&](std::int64_t row) {
      gradient_row({.logits = gradients.as<float>() + row * size,
                    .size = size,
                    .target = targets[row] - static_cast<std::int32_t>(begin),
                    .gradient_scale = gradient_scale_of(head, row),
                    .gradient = true},
                   scales[row]);
    });
    linear_backward_weight(parallel, rest, gradients, head.x, head.dweight.rows(begin, end), {});
  }
}

}  // namespace

std::int64_t head_loss_rows(std::int64_t tokens, std::int64_t vocabulary) {
  const std::int64_t most = std::max<std::int64_t>(1, most_logits / std::max<std::int64_t>(1, vocabulary));
  return Blocks(tokens, most).size;
}

std::size_t head_loss_scratch(std::int64_t tokens, std::int64_t channels, std::int64_t vocabulary, DType activations,
                              int threads, std::int64_t written, bool token_rows) {
  // The even split of fewer tokens may give larger chunks, so the bound for up to `tokens` is not their own chunk.
  const std::int64_t most = std::max<std::int64_t>(1, most_logits / std::max<std::int64_t>(1, vocabulary));
  const bool whole = written >= vocabulary, slices = written > 0 && !whole;
  const std::int64_t rows = whole ? tokens : std::min(tokens, most);
  const std::size_t columns = whole && token_rows ? Scratch::bytes_of(tokens * tokens) : 0;
  const std::int64_t outputs = columns > 0 ? std::max(vocabulary, tokens) : vocabulary;
  const std::size_t at_once =
      Scratch::bytes_of(rows * vocabulary) + columns + linear_scratch(rows, channels, outputs, activations, threads);
  if (!slices) return at_once;
  const std::size_t slice =
      Scratch::bytes_of(tokens * written) + linear_scratch(tokens, channels, written, activations, threads);
  return Scratch::bytes_of(2 * tokens) + std::max(at_once, slice);
}

void head_loss(Parallel& parallel, const Workspace& workspace, const HeadLoss& head) {
  const std::int64_t n = head.x.shape[0], vocabulary = head.weight.shape[0];
  const std::int32_t* const targets = head.targets.as<std::int32_t>();
  float* const losses = head.losses.as<float>();
  const bool slices = head.in_slices(), gradient = head.gradients_at_first();
  check_targets(targets, n, vocabulary);
  if (head.tokens) check_tokens("head_loss", head.tokens, vocabulary);
  const std::int64_t at_once = head_loss_rows(n, vocabulary);
  // A gradient written whole is one product over all rows.
  const bool whole = head.writes_weight() && !slices;
  const std::int64_t kept = whole ? n : at_once;
  auto* const scales = slices ? reinterpret_cast<RowScale*>(workspace.data) : nullptr;
  const Workspace behind = slices ? workspace.after(Scratch::bytes_of(2 * n)) : workspace;
  const Workspace rest = behind.after(Scratch::bytes_of(kept * vocabulary));
  const TensorView all{behind.data, DType::f32, {kept, vocabulary}};
  for (std::int64_t begin = 0; begin < n; begin += at_once) {
    const std::int64_t end = std::min(n, begin + at_once);
    const TensorView logits = whole ? all.rows(begin, end) : all.rows(0, end - begin);
    linear(parallel, rest, head.x.rows(begin, end), head.weight, {}, logits);
    parallel.run(end - begin, [&](std::int64_t row) {
      const RowLoss result = softmax_row({.logits = logits.as<float>() + row * vocabulary,
                                          .size = vocabulary,
                                          .target = targets[begin + row],
                                          .gradient_scale = gradient_scale_of(head, begin + row),
                                          .gradient = gradient});
      losses[begin + row] = result.loss;
      if (slices) scales[begin + row] = result.scale;
    });
    if (!gradient) continue;
    if (head.dx) linear_backward_input(parallel, rest, logits, head.weight, head.dx.rows(begin, end), false);
    if (!head.dweight || head.writes_weight()) continue;
    linear_backward_weight(parallel, rest, logits, head.x.rows(begin, end), head.dweight, {});
  }
  if (whole) linear_backward_weight(parallel, rest, all, head.x, head.dweight, {});
  if (slices) write_in_slices(parallel, behind, head, scales);
  if (head.token_rows) make_token_rows(parallel, rest, head, all);
}

}  // namespace tandem::fast
