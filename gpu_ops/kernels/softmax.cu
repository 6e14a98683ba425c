// Cross-entropy of rows of logits, and its gradient: a block for each row, the row read twice.
#include <cmath>

#include "core/numerics/functions.hpp"
#include "gpu_ops/base/kernels.hpp"
#include "gpu_ops/base/launch.hpp"
#include "gpu_ops/kernels/block_sums.hpp"
#include "gpu_ops/kernels/elements.hpp"

namespace tandem::gpu {
namespace {

constexpr std::uint32_t minus_infinity = 0xff800000u;
constexpr std::uint32_t quiet_nan = 0x7fc00000u;

/// Largest logit of a row and the sum of exponentials, in every thread: one pass, rescaled where a larger one comes.
TANDEM_DEVICE SoftmaxSum row_softmax_sum(const float* logits, std::int64_t size, bool aligned, float* room) {
  SoftmaxSum own{numerics::bits_float(minus_infinity), 0.0F};
  for_row_spans(size, aligned, [&](const Span& span) {
    const Floats v = load(logits, span);
    float top = own.largest;
    for (int i = 0; i < packet; ++i) {
      if (i < span.count && !(v.x[i] <= top)) top = v.x[i];
    }
    float sum = own.sum == 0.0F ? 0.0F : own.sum * numerics::exp(own.largest - top);
    for (int i = 0; i < packet; ++i) {
      if (i < span.count) sum = sum + numerics::exp(v.x[i] - top);
    }
    own = {top, sum};
  });
  return block_softmax_sum(own, room);
}

/// Scale of the gradients of a row's loss.
TANDEM_DEVICE float gradient_scale_of(const LogitRows& r, std::int64_t row) {
  if (r.factors == nullptr) return r.gradient_scale;
  return r.gradient_scale * r.factors[(r.first_row + row) / r.sequence];
}

/// Writes the gradients of a row's logits. `target` is the target's index among these columns; any index outside them
/// otherwise.
template <class T>
TANDEM_DEVICE void write_gradients(const LogitRows& r, std::int64_t row, std::int64_t target, const RowScale& scale,
                                   bool aligned) {
  const bool none = r.targets[row] < 0;
  const float of_target = gradient_scale_of(r, row);
  for_row_spans(r.size, aligned, [&](const Span& span) {
    Floats v = load(r.logits + row * r.stride, span);
    for (int i = 0; i < packet; ++i) {
      const float own = span.at + i == target ? of_target : 0.0F;
      v.x[i] = none ? 0.0F : numerics::fma(numerics::exp(v.x[i] - scale.largest), scale.factor, -own);
    }
    store(static_cast<T*>(r.gradient) + row * r.stride, span, v);
  });
}

/// T: of the gradient.
template <class T>
TANDEM_KERNEL(most_threads)
softmax_loss_kernel(LogitRows r, bool aligned) {
  TANDEM_SHARED(float, room, 2 * most_warps);
  const std::int64_t size = r.size;
  for (std::int64_t row = block_index(); row < r.rows; row += grid_size()) {
    const float* const x = r.logits + row * r.stride;
    const std::int64_t target = r.targets[row];
    // Read by all before the barriers of the sum: the gradient may take its place.
    const float nan = numerics::bits_float(quiet_nan), at_target = target >= 0 && target < size ? x[target] : nan;
    const SoftmaxSum all = row_softmax_sum(x, size, aligned, room);
    if (thread_index() == 0) {
      const double loss =
          std::log(static_cast<double>(all.sum)) + static_cast<double>(all.largest) - static_cast<double>(at_target);
      r.losses[row] = target < 0 ? 0.0F : static_cast<float>(loss);
    }
    const RowScale scale{all.largest, target < size ? numerics::div(gradient_scale_of(r, row), all.sum) : nan};
    if (r.scales != nullptr && thread_index() == 0) r.scales[row] = scale;
    if (r.gradient != nullptr) write_gradients<T>(r, row, target, scale, aligned);
  }
}

/// T: of the gradient.
template <class T>
TANDEM_KERNEL(most_threads)
softmax_gradients_kernel(LogitRows r, bool aligned) {
  for (std::int64_t row = block_index(); row < r.rows; row += grid_size()) {
    write_gradients<T>(r, row, r.targets[row] - r.first, r.scales[row], aligned);
  }
}

template <class T>
TANDEM_KERNEL(most_threads)
gather_columns_kernel(ColumnGather g) {
  for (std::int64_t row = block_index(); row < g.rows; row += grid_size()) {
    const T* const from = static_cast<const T*>(g.from) + row * g.from_stride;
    T* const to = static_cast<T*>(g.to) + row * g.to_stride;
    for (std::int64_t i = thread_index(); i < g.rows; i += most_threads) {
      const std::int64_t id = g.ids[i];
      to[i] = id >= 0 && id < g.size ? from[id] : T{};
    }
  }
}

}  // namespace

void softmax_loss(const LogitRows& r, CUstream_st* stream) {
  with_activation(r.gradient_dtype, [&]<class T>(T) {
    launch("softmax_loss", softmax_loss_kernel<T>, row_geometry(r.rows, r.size), stream, r,
           whole_packets<bf16>(r.stride) && aligned(r.logits, r.gradient));
  });
}

void softmax_gradients(const LogitRows& r, CUstream_st* stream) {
  with_activation(r.gradient_dtype, [&]<class T>(T) {
    launch("softmax_gradients", softmax_gradients_kernel<T>, row_geometry(r.rows, r.size), stream, r,
           whole_packets<bf16>(r.stride) && aligned(r.logits, r.gradient));
  });
}

void gather_columns(const ColumnGather& g, CUstream_st* stream) {
  with_activation(g.dtype, [&]<class T>(T) {
    launch("gather_columns", gather_columns_kernel<T>, Geometry{blocks_for(g.rows, 1), most_threads}, stream, g);
  });
}

}  // namespace tandem::gpu
