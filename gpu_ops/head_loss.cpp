#include "gpu_ops/head_loss.hpp"

#include <algorithm>

#include "gpu_ops/geometry.hpp"
#include "gpu_ops/kernels.hpp"

namespace tandem::gpu {
namespace {

/// Logits at once, 128 MiB of fp32: for every chunk the gradient of the whole weight is read and written, which
/// fewer rows would not outweigh; more would cost a small card too much.
constexpr std::int64_t most_logits = std::int64_t{32} << 20;

std::int64_t most_rows(std::int64_t vocabulary) {
  return std::max<std::int64_t>(1, most_logits / std::max<std::int64_t>(1, vocabulary));
}

/// Rows of logits begin at multiples of 16 bytes, whatever the vocabulary.
std::int64_t stride_of(std::int64_t vocabulary) { return ceil_div(vocabulary, packet) * packet; }

std::size_t logit_bytes(std::int64_t rows, std::int64_t vocabulary, DType dtype) {
  return align_up(static_cast<std::size_t>(rows * stride_of(vocabulary)) * size_of(dtype));
}

}  // namespace

std::int64_t head_loss_rows(std::int64_t tokens, std::int64_t vocabulary) {
  return std::max<std::int64_t>(
      1, cut(tokens, ceil_div(std::max<std::int64_t>(1, tokens), most_rows(vocabulary)), 1).size);
}

std::size_t head_loss_scratch(std::int64_t tokens, std::int64_t vocabulary, DType activations) {
  // The even split of fewer tokens may give larger chunks, so the bound for up to `tokens` is not their own chunk.
  const std::int64_t rows = std::min(tokens, most_rows(vocabulary));
  return logit_bytes(rows, vocabulary, DType::f32) +
         (activations == DType::f32 ? 0 : logit_bytes(rows, vocabulary, activations));
}

void head_loss(const HeadLoss& head, Matmul& matmul, void* matmul_workspace, void* scratch, CUstream_st* stream) {
  const std::int64_t n = head.x.shape[0], channels = head.x.shape[1], vocabulary = head.weight.shape[0];
  const std::int64_t at_once = head_loss_rows(n, vocabulary), stride = stride_of(vocabulary);
  const DType dtype = head.x.dtype;
  auto* const logits = static_cast<float*>(scratch);
  // fp32 gradients take the place of the logits.
  void* const gradient =
      dtype == DType::f32 ? scratch : static_cast<std::byte*>(scratch) + logit_bytes(at_once, vocabulary, DType::f32);
  for (std::int64_t begin = 0; begin < n; begin += at_once) {
    const std::int64_t end = std::min(n, begin + at_once), rows = end - begin;
    const TensorView x = head.x.rows(begin, end);
    matmul.run({.m = rows,
                .n = vocabulary,
                .k = channels,
                .a = {x.data, dtype, channels, false},
                .b = {head.weight.data, DType::bf16, channels, true},
                .c = logits,
                .c_dtype = DType::f32,
                .c_stride = stride},
               matmul_workspace, stream);
    softmax_loss({.logits = logits,
                  .targets = head.targets.as<std::int32_t>() + begin,
                  .losses = head.losses.as<float>() + begin,
                  .gradient = head.dx ? gradient : nullptr,
                  .gradient_dtype = dtype,
                  .gradient_scale = head.gradient_scale,
                  .rows = rows,
                  .size = vocabulary,
                  .stride = stride},
                 stream);
    if (!head.dx) continue;
    matmul.run({.m = rows,
                .n = channels,
                .k = vocabulary,
                .a = {gradient, dtype, stride, false},
                .b = {head.weight.data, DType::bf16, channels, false},
                .c = head.dx.rows(begin, end).data,
                .c_dtype = dtype,
                .c_stride = channels},
               matmul_workspace, stream);
    if (!head.dweight) continue;
    matmul.run({.m = vocabulary,
                .n = channels,
                .k = rows,
                .a = {gradient, dtype, stride, true},
                .b = {x.data, dtype, channels, false},
                .addend = head.dweight.data,
                .c = head.dweight.data,
                .c_dtype = DType::f32,
                .c_stride = channels},
               matmul_workspace, stream);
  }
}

}  // namespace tandem::gpu
