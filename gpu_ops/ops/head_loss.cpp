#include "gpu_ops/ops/head_loss.hpp"

#include <algorithm>

#include "gpu_ops/base/kernels.hpp"

namespace tandem::gpu {
namespace {

/// One call: its logits, and what becomes of them.
class Head {
 public:
  Head(const HeadLoss& head, const HeadRows& at_once, Matmul& matmul, void* matmul_workspace, void* scratch,
       CUstream_st* stream)
      : head_(head),
        at_once_(at_once),
        shape_(shape_of(head)),
        matmul_(matmul),
        workspace_(matmul_workspace),
        stream_(stream),
        dtype_(head.x.dtype),
        channels_(head.x.shape[1]),
        vocabulary_(head.weight.shape[0]),
        stride_(logit_stride(vocabulary_)),
        factors_(head.sequence_factors ? head.sequence_factors.as<float>() : nullptr),
        sequence_(factors_ == nullptr ? 1 : head.x.shape[0] / head.sequence_factors.shape[0]),
        scales_(shape_.in_slices() ? static_cast<RowScale*>(scratch) : nullptr),
        logits_(reinterpret_cast<float*>(static_cast<std::byte*>(scratch) + row_scales_bytes(shape_))),
        gradients_(behind_logits(at_once.logits, vocabulary_)),
        columns_(gradients_ + logit_bytes(shape_.tokens, vocabulary_, dtype_)) {}

  void run() {
    const std::int64_t n = shape_.tokens;
    for (std::int64_t begin = 0; begin < n; begin += at_once_.gradients) {
      const std::int64_t end = std::min(n, begin + at_once_.gradients);
      for (std::int64_t first = begin; first < end; first += at_once_.logits) {
        losses(first, std::min(end, first + at_once_.logits), first - begin);
      }
      if (head_.dx) backward_input(begin, end);
      if (head_.dweight && !shape_.in_slices()) backward_weight(gradients_, begin, end, 0, vocabulary_);
    }
    if (head_.token_rows) token_rows();
    if (!shape_.in_slices()) return;
    for (std::int64_t first = 0; first < vocabulary_; first += shape_.written) {
      write_slice(first, std::min(vocabulary_, first + shape_.written));
    }
  }

 private:
  /// Gradients in fp32 take the place of their logits.
  std::byte* behind_logits(std::int64_t rows, std::int64_t columns) const {
    auto* const at = reinterpret_cast<std::byte*>(logits_);
    return dtype_ == DType::f32 ? at : at + logit_bytes(rows, columns, DType::f32);
  }

  /// Computes the logits of rows [begin, end) for the part [first, last) of the vocabulary.
  void make_logits(std::int64_t begin, std::int64_t end, std::int64_t first, std::int64_t last) {
    matmul_.run({.m = end - begin,
                 .n = last - first,
                 .k = channels_,
                 .a = {head_.x.rows(begin, end).data, dtype_, channels_, false},
                 .b = {head_.weight.rows(first, last).data, DType::bf16, channels_, true},
                 .c = logits_,
                 .c_dtype = DType::f32,
                 .c_stride = logit_stride(last - first)},
                workspace_, stream_);
  }

  /// Losses of rows [begin, end), and the gradients of their logits where there are any, as row `at` and those after
  /// it.
  void losses(std::int64_t begin, std::int64_t end, std::int64_t at) {
    make_logits(begin, end, 0, vocabulary_);
    std::byte* const gradient = gradients_ + static_cast<std::size_t>(at * stride_) * size_of(dtype_);
    softmax_loss({.logits = logits_,
                  .targets = head_.targets.as<std::int32_t>() + begin,
                  .losses = head_.losses.as<float>() + begin,
                  .gradient = head_.gradients_at_first() ? gradient : nullptr,
                  .gradient_dtype = dtype_,
                  .gradient_scale = head_.gradient_scale,
                  .factors = factors_,
                  .sequence = sequence_,
                  .first_row = begin,
                  .rows = end - begin,
                  .size = vocabulary_,
                  .stride = stride_,
                  .scales = scales_ == nullptr ? nullptr : scales_ + begin},
                 stream_);
  }

  /// Computes the gradient of the input from the gradients of the logits of rows [begin, end).
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

  /// Computes rows [first, last) of the weight's gradient, f32 added to or bf16 written, from the gradients of the
  /// logits of rows [begin, end).
  void backward_weight(const std::byte* gradients, std::int64_t begin, std::int64_t end, std::int64_t first,
                       std::int64_t last) {
    const TensorView dweight = head_.dweight.rows(first, last);
    matmul_.run({.m = last - first,
                 .n = channels_,
                 .k = end - begin,
                 .a = {gradients, dtype_, logit_stride(last - first), true},
                 .b = {head_.x.rows(begin, end).data, dtype_, channels_, false},
                 .addend = dweight.dtype == DType::f32 ? dweight.data : nullptr,
                 .c = dweight.data,
                 .c_dtype = dweight.dtype,
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

  /// Rows [first, end) of the weight's gradient, of the gradients of those logits of all rows, which are made again.
  void write_slice(std::int64_t first, std::int64_t end) {
    const std::int64_t n = shape_.tokens, size = end - first, stride = logit_stride(size);
    std::byte* const gradients = behind_logits(at_once_.slice_logits, shape_.written);
    for (std::int64_t begin = 0; begin < n; begin += at_once_.slice_logits) {
      const std::int64_t rows = std::min(at_once_.slice_logits, n - begin);
      make_logits(begin, begin + rows, first, end);
      softmax_gradients({.logits = logits_,
                         .targets = head_.targets.as<std::int32_t>() + begin,
                         .gradient = gradients + static_cast<std::size_t>(begin * stride) * size_of(dtype_),
                         .gradient_dtype = dtype_,
                         .gradient_scale = head_.gradient_scale,
                         .factors = factors_,
                         .sequence = sequence_,
                         .first_row = begin,
                         .rows = rows,
                         .size = size,
                         .stride = stride,
                         .scales = scales_ + begin,
                         .first = first},
                        stream_);
    }
    backward_weight(gradients, 0, n, first, end);
  }

  const HeadLoss& head_;
  HeadRows at_once_;
  HeadShape shape_;
  Matmul& matmul_;
  void* workspace_;
  CUstream_st* stream_;
  DType dtype_;
  std::int64_t channels_, vocabulary_, stride_;
  const float* factors_;   ///< factors of the gradients of each sequence's losses, or null
  std::int64_t sequence_;  ///< rows of a sequence
  RowScale* scales_;       ///< scales of all rows, where the weight's gradient is written in slices
  float* logits_;
  std::byte* gradients_;
  std::byte* columns_;  ///< behind those of all rows, where these are kept
};

}  // namespace

HeadShape shape_of(const HeadLoss& head) {
  const std::int64_t vocabulary = head.weight.shape[0];
  const std::int64_t written = head.in_slices() ? head.rows_at_once : vocabulary;
  return {.tokens = head.x.shape[0],
          .vocabulary = vocabulary,
          .activations = head.x.dtype,
          .written = head.writes_weight() ? written : 0,
          .gradients = head.gradients(),
          .token_rows = static_cast<bool>(head.token_rows)};
}

void head_loss(const HeadLoss& head, const HeadRows& at_once, Matmul& matmul, void* matmul_workspace, void* scratch,
               CUstream_st* stream) {
  Head(head, at_once, matmul, matmul_workspace, scratch, stream).run();
}

}  // namespace tandem::gpu
