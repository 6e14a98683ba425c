#include "gpu_ops/head_loss.hpp"

#include <algorithm>

#include "gpu_ops/kernels.hpp"

namespace tandem::gpu {
namespace {

/// One call: its logits, and what becomes of them.
class Head {
 public:
  Head(const HeadLoss& head, std::int64_t logit_rows, Matmul& matmul, void* matmul_workspace, void* scratch,
       CUstream_st* stream)
      : head_(head),
        matmul_(matmul),
        workspace_(matmul_workspace),
        stream_(stream),
        dtype_(head.x.dtype),
        channels_(head.x.shape[1]),
        vocabulary_(head.weight.shape[0]),
        stride_(logit_stride(vocabulary_)),
        logits_(static_cast<float*>(scratch)),
        gradients_(static_cast<std::byte*>(scratch)) {
    if (dtype_ != DType::f32) gradients_ += logit_bytes(logit_rows, vocabulary_, DType::f32);
    columns_ = gradients_ + logit_bytes(head.x.shape[0], vocabulary_, dtype_);
  }

  /// Losses of rows [begin, end), and the gradients of their logits where there are any, as row `at` and those after
  /// it.
  void losses(std::int64_t begin, std::int64_t end, std::int64_t at) {
    const TensorView x = head_.x.rows(begin, end);
    matmul_.run({.m = end - begin,
                 .n = vocabulary_,
                 .k = channels_,
                 .a = {x.data, dtype_, channels_, false},
                 .b = {head_.weight.data, DType::bf16, channels_, true},
                 .c = logits_,
                 .c_dtype = DType::f32,
                 .c_stride = stride_},
                workspace_, stream_);
    std::byte* const gradient = gradients_ + static_cast<std::size_t>(at * stride_) * size_of(dtype_);
    softmax_loss({.logits = logits_,
                  .targets = head_.targets.as<std::int32_t>() + begin,
                  .losses = head_.losses.as<float>() + begin,
                  .gradient = head_.gradients() ? gradient : nullptr,
                  .gradient_dtype = dtype_,
                  .gradient_scale = head_.gradient_scale,
                  .rows = end - begin,
                  .size = vocabulary_,
                  .stride = stride_},
                 stream_);
  }

  /// From the gradients of the logits of rows [begin, end) to that of the input.
  void backward_input(std::int64_t begin, std::int64_t end) {
    matmul_.run({.m = end - begin,
                 .n = channels_,
                 .k = vocabulary_,
                 .a = {gradients_, dtype_, stride_, false},
                 .b = {head_.weight.data, DType::bf16, channels_, false},
                 .c = head_.dx.rows(begin, end).data,
                 .c_dtype = dtype_,
                 .c_stride = channels_},
                workspace_, stream_);
  }

  /// ... and to that of the weight.
  void backward_weight(std::int64_t begin, std::int64_t end) {
    const TensorView x = head_.x.rows(begin, end);
    matmul_.run({.m = vocabulary_,
                 .n = channels_,
                 .k = end - begin,
                 .a = {gradients_, dtype_, stride_, true},
                 .b = {x.data, dtype_, channels_, false},
                 .addend = head_.dweight.dtype == DType::f32 ? head_.dweight.data : nullptr,
                 .c = head_.dweight.data,
                 .c_dtype = head_.dweight.dtype,
                 .c_stride = channels_},
                workspace_, stream_);
  }

  /// The gradient of the weight once more, of the rows that tokens name and in fp32, when the gradients of all logits
  /// are there: one product of those of their columns.
  void token_rows() {
    const std::int64_t n = head_.x.shape[0], stride = token_columns_stride(n);
    gather_columns({.from = gradients_,
                    .to = columns_,
                    .dtype = dtype_,
                    .ids = head_.tokens.as<std::int32_t>(),
                    .rows = n,
                    .size = vocabulary_,
                    .from_stride = stride_,
                    .to_stride = stride},
                   stream_);
    matmul_.run({.m = n,
                 .n = channels_,
                 .k = n,
                 .a = {columns_, dtype_, stride, true},
                 .b = {head_.x.data, dtype_, channels_, false},
                 .c = head_.token_rows.data,
                 .c_dtype = DType::f32,
                 .c_stride = channels_},
                workspace_, stream_);
  }

 private:
  const HeadLoss& head_;
  Matmul& matmul_;
  void* workspace_;
  CUstream_st* stream_;
  DType dtype_;
  std::int64_t channels_, vocabulary_, stride_;
  float* logits_;
  std::byte* gradients_;
  std::byte* columns_;  ///< behind those of all rows, where these are kept
};

}  // namespace

void head_loss(const HeadLoss& head, HeadRows at_once, Matmul& matmul, void* matmul_workspace, void* scratch,
               CUstream_st* stream) {
  const std::int64_t n = head.x.shape[0];
  Head call(head, at_once.logits, matmul, matmul_workspace, scratch, stream);
  for (std::int64_t begin = 0; begin < n; begin += at_once.gradients) {
    const std::int64_t end = std::min(n, begin + at_once.gradients);
    for (std::int64_t first = begin; first < end; first += at_once.logits) {
      call.losses(first, std::min(end, first + at_once.logits), first - begin);
    }
    if (head.dx) call.backward_input(begin, end);
    if (head.dweight) call.backward_weight(begin, end);
  }
  if (head.token_rows) call.token_rows();
}

}  // namespace tandem::gpu
