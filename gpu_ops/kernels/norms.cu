// LayerNorm and RMSNorm: a warp or a block for each row.
#include "core/numerics/ieee.hpp"
#include "gpu_ops/kernels.hpp"
#include "gpu_ops/kernels/block_sums.hpp"
#include "gpu_ops/kernels/elements.hpp"
#include "gpu_ops/launch.hpp"

namespace tandem::gpu {
namespace {

TANDEM_DEVICE float inverse_root(float mean_square, float eps) {
  return numerics::div(1.0F, numerics::sqrt(mean_square + eps));
}

/// Who shares a row: the lanes of a warp, or all threads of the block.
template <bool by_warp>
struct Team {
  static constexpr int most_threads = by_warp ? warp_row_threads : gpu::most_threads;
  TANDEM_DEVICE static int size() { return by_warp ? warp_lanes : block_size(); }
  TANDEM_DEVICE static int index() { return thread_index() % size(); }
  TANDEM_DEVICE static std::int64_t first_row() {
    return by_warp ? block_index() * warp_row_warps + thread_index() / warp_lanes : block_index();
  }
  TANDEM_DEVICE static std::int64_t stride() { return by_warp ? grid_size() * warp_row_warps : grid_size(); }
  /// In every thread of the team, all of which call it.
  TANDEM_DEVICE static float sum(float value, float* room) {
    if constexpr (by_warp) return warp_sum(value);
    return block_sum(value, room);
  }
};

/// What a thread has of a row: `held` packets at most, read once and kept in registers, so that later passes wait for
/// nothing; 0: any number, read again in each pass. They are kept as they lie in memory: to widen one is to wait for it,
/// and all of them are to be on their way at once.
template <class T, class Team, int held>
class RowPart {
 public:
  TANDEM_DEVICE RowPart(const T* row, std::int64_t channels, bool aligned)
      : row_(row), channels_(channels), aligned_(aligned) {
    TANDEM_UNROLL
    for (int k = 0; k < held; ++k) {
      if (begin_of(k) < channels_) kept_[k] = load_raw(row_, span_at(begin_of(k), channels_, aligned_));
    }
  }

  /// body(span, values) for each span of the thread's, always in the same order.
  template <class Body>
  TANDEM_DEVICE void each(const Body& body) const {
    if constexpr (held == 0) {
      for (std::int64_t k = 0; begin_of(k) < channels_; ++k) {
        const Span span = span_at(begin_of(k), channels_, aligned_);
        body(span, load(row_, span));
      }
    } else {
      TANDEM_UNROLL
      for (int k = 0; k < held; ++k) {
        if (begin_of(k) < channels_) body(span_at(begin_of(k), channels_, aligned_), widened(kept_[k]));
      }
    }
  }

 private:
  TANDEM_DEVICE static std::int64_t begin_of(std::int64_t k) { return (k * Team::size() + Team::index()) * packet; }

  const T* row_;
  std::int64_t channels_;
  bool aligned_;
  Raw<T> kept_[held > 0 ? held : 1];
};

/// Blocks that a multiprocessor's registers have to hold, so that some load while others sum: as many as fit without
/// spilling where threads hold little of a row.
template <class T, class Team, int held>
struct Blocks {
  static constexpr bool narrow = sizeof(T) == sizeof(bf16) && Team::most_threads == most_threads;
  static constexpr int at_once = !narrow ? 1 : held == 1 ? 5 : held == 2 ? 6 : 1;
};

/// `means` is null for RMSNorm, `bias` where there is none.
template <class T, class Team, int held>
TANDEM_KERNEL_BY(Team::most_threads, (Blocks<T, Team, held>::at_once))
norm_kernel(const T* x, const bf16* weight, float offset, const bf16* bias, T* y, float* means, float* rstds, float eps,
            std::int64_t rows, std::int64_t channels, bool aligned) {
  TANDEM_SHARED(float, room, most_warps);
  const float inverse = numerics::div(1.0F, static_cast<float>(channels));
  for (std::int64_t row = Team::first_row(); row < rows; row += Team::stride()) {
    const RowPart<T, Team, held> part(x + row * channels, channels, aligned);
    T* const out = y + row * channels;
    float mean = 0.0F;
    if (means != nullptr) {
      float sum = 0.0F;
      part.each([&](const Span&, const Floats& v) {
        for (int i = 0; i < packet; ++i) sum = sum + v.x[i];
      });
      mean = inverse * Team::sum(sum, room);
    }
    float squares = 0.0F;
    part.each([&](const Span& span, const Floats& v) {
      for (int i = 0; i < packet; ++i) {
        const float centred = i < span.count ? v.x[i] - mean : 0.0F;
        squares = numerics::fma(centred, centred, squares);
      }
    });
    const float rstd = inverse_root(inverse * Team::sum(squares, room), eps);
    part.each([&](const Span& span, Floats v) {
      const Floats w = widened_plus(load_raw(weight, span), offset);
      Floats shift = {};
      if (bias != nullptr) shift = load(bias, span);
      for (int i = 0; i < packet; ++i) v.x[i] = numerics::fma((v.x[i] - mean) * rstd, w.x[i], shift.x[i]);
      store(out, span, v);
    });
    if (Team::index() == 0) {
      if (means != nullptr) means[row] = mean;
      rstds[row] = rstd;
    }
  }
}

/// 16-byte accesses of every row.
template <class T, class... Pointer>
bool aligned_rows(std::int64_t channels, const Pointer*... addresses) {
  return whole_packets<T>(channels) && aligned(addresses...);
}

void norm(const char* name, TensorView x, NormWeight weight, TensorView bias, TensorView y, TensorView mean,
          TensorView rstd, float eps, CUstream_st* stream) {
  const std::int64_t rows = x.shape[0], channels = x.shape[1];
  const auto start = [&]<class T, bool by_warp, int held>() {
    launch(name, norm_kernel<T, Team<by_warp>, held>,
           by_warp ? warp_row_geometry(rows) : row_geometry(rows, channels), stream, x.as<T>(), weight.values.as<bf16>(),
           weight.offset, optional<bf16>(bias), y.as<T>(), optional<float>(mean), rstd.as<float>(), eps, rows, channels,
           aligned_rows<T>(channels, x.data, weight.values.data, bias.data, y.data));
  };
  // A warp needs no barriers. Its lanes could hold longer rows too, but in so many registers that too few warps would
  // run to hide what one of them waits for.
  const std::int64_t of_lane = ceil_div(channels, packet * warp_lanes), of_thread = ceil_div(channels, packet * most_threads);
  with_activation(x.dtype, [&]<class T>(T) {
    if (of_lane <= 1) return start.template operator()<T, true, 1>();
    if (of_lane <= 4) return start.template operator()<T, true, 4>();
    if (of_thread <= 1) return start.template operator()<T, false, 1>();
    if (of_thread <= 2) return start.template operator()<T, false, 2>();
    if (of_thread <= 4) return start.template operator()<T, false, 4>();
    start.template operator()<T, false, 0>();
  });
}

}  // namespace

void layer_norm(TensorView x, TensorView weight, TensorView bias, TensorView y, TensorView mean, TensorView rstd,
                float eps, CUstream_st* stream) {
  norm("layer_norm", x, weight, bias, y, mean, rstd, eps, stream);
}

void rms_norm(TensorView x, NormWeight weight, TensorView y, TensorView rstd, float eps, CUstream_st* stream) {
  norm("rms_norm", x, weight, {}, y, {}, rstd, eps, stream);
}

}  // namespace tandem::gpu
