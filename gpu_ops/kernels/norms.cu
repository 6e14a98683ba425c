// LayerNorm and RMSNorm: a warp or a block for each row.
#include <type_traits>

#include "core/numerics/ieee.hpp"
#include "gpu_ops/base/kernels.hpp"
#include "gpu_ops/base/launch.hpp"
#include "gpu_ops/kernels/block_sums.hpp"
#include "gpu_ops/kernels/magnitude.hpp"

namespace tandem::gpu {
namespace {

TANDEM_DEVICE float inverse_root(float mean_square, float eps) {
  return numerics::div(1.0F, numerics::sqrt(mean_square + eps));
}

/// Sums of one value of each lane of the warp.
struct WarpSums {
  TANDEM_DEVICE explicit WarpSums(float*) {}
  TANDEM_DEVICE float operator()(float value) { return warp_sum(value); }
};

/// Threads that share a row: the lanes of a warp, or all threads of the block.
template <bool by_warp>
struct Team {
  static constexpr int most_threads = by_warp ? warp_row_threads : gpu::most_threads;
  using Sums = std::conditional_t<by_warp, WarpSums, BlockSums>;
  TANDEM_DEVICE static int size() { return by_warp ? warp_lanes : block_size(); }
  TANDEM_DEVICE static int index() { return by_warp ? own_lane() : thread_index(); }
  TANDEM_DEVICE static std::int64_t first_row() {
    return by_warp ? block_index() * warp_row_warps + thread_index() / warp_lanes : block_index();
  }
  TANDEM_DEVICE static std::int64_t stride() { return by_warp ? grid_size() * warp_row_warps : grid_size(); }
};

/// A thread's part of a row: `held` packets at most, all of them wide, read once and kept in registers, so that later
/// passes wait for nothing.
template <class T, class Team, int held>
class RowPart {
 public:
  TANDEM_DEVICE RowPart(const T* row, std::int64_t channels, bool) : channels_(static_cast<int>(channels)) {
    // To widen a packet is to wait for it, and all of them are to be on their way at once.
    Raw<T> raw[held];
    TANDEM_UNROLL
    for (int k = 0; k < held; ++k) {
      raw[k] = {};
      if (begin_of(k) < channels_) raw[k] = wide_load_raw(row + begin_of(k));
    }
    TANDEM_UNROLL
    for (int k = 0; k < held; ++k) kept_[k] = widened(raw[k]);
  }

  /// Takes `mean` from all values.
  TANDEM_DEVICE void centre(float mean) {
    TANDEM_UNROLL
    for (int k = 0; k < held; ++k) {
      for (int i = 0; i < packet; ++i) kept_[k].x[i] = kept_[k].x[i] - mean;
    }
  }

  /// body(span, values) for each span of the thread's, always in the same order.
  template <class Body>
  TANDEM_DEVICE void each(const Body& body) const {
    TANDEM_UNROLL
    for (int k = 0; k < held; ++k) {
      if (begin_of(k) < channels_) body(Span{begin_of(k), packet, true}, kept_[k]);
    }
  }

 private:
  TANDEM_DEVICE static int begin_of(int k) { return (k * Team::size() + Team::index()) * packet; }

  int channels_;
  Floats kept_[held];
};

/// Any number of packets, of any kind, read again in each pass.
template <class T, class Team>
class RowPart<T, Team, 0> {
 public:
  TANDEM_DEVICE RowPart(const T* row, std::int64_t channels, bool aligned)
      : row_(row), channels_(channels), aligned_(aligned) {}

  TANDEM_DEVICE void centre(float mean) { mean_ = mean; }

  template <class Body>
  TANDEM_DEVICE void each(const Body& body) const {
    for (std::int64_t at = Team::index() * packet; at < channels_; at += Team::size() * packet) {
      const Span span = span_at(at, channels_, aligned_);
      Floats v = load(row_, span);
      for (int i = 0; i < packet; ++i) v.x[i] = i < span.count ? v.x[i] - mean_ : 0.0F;
      body(span, v);
    }
  }

 private:
  const T* row_;
  std::int64_t channels_;
  bool aligned_;
  float mean_ = 0.0F;
};

/// Blocks that a multiprocessor's registers have to hold, so that some load while others sum: as many as fit without
/// spilling where threads hold little of a row.
template <class T, class Team, int held>
struct Blocks {
  static constexpr bool narrow = sizeof(T) == sizeof(bf16) && Team::most_threads == most_threads;
  static constexpr int at_once = !narrow || held == 0 ? 1 : held <= 2 ? 6 : 3;
};

/// `means` is null for RMSNorm, `bias` where there is none.
template <class T, class Team, int held, bool finds>
TANDEM_KERNEL_BY(Team::most_threads, (Blocks<T, Team, held>::at_once))
norm_kernel(const T* x, const bf16* weight, float offset, const bf16* bias, T* y, Largest* largest, float* means,
            float* rstds, float eps, std::int64_t rows, std::int64_t channels, bool aligned) {
  TANDEM_SHARED(float, room, BlockSums::room_size);
  TANDEM_SHARED(std::uint32_t, magnitudes, most_warps);
  Magnitude<finds> magnitude(largest);
  typename Team::Sums sum_of(room);
  const float inverse = numerics::div(1.0F, static_cast<float>(channels));
  for (std::int64_t row = Team::first_row(); row < rows; row += Team::stride()) {
    RowPart<T, Team, held> part(x + row * channels, channels, aligned);
    T* const out = y + row * channels;
    if (means != nullptr) {
      float sum = 0.0F;
      part.each([&](const Span&, const Floats& v) {
        for (int i = 0; i < packet; ++i) sum = sum + v.x[i];
      });
      const float mean = inverse * sum_of(sum);
      part.centre(mean);
      if (Team::index() == 0) means[row] = mean;
    }
    float squares = 0.0F;
    part.each([&](const Span&, const Floats& v) {
      for (int i = 0; i < packet; ++i) squares = numerics::fma(v.x[i], v.x[i], squares);
    });
    const float rstd = inverse_root(inverse * sum_of(squares), eps);
    if (Team::index() == 0) rstds[row] = rstd;
    part.each([&](const Span& span, const Floats& v) {
      const Floats w = widened_plus(load_raw(weight, span), offset);
      Raw<bf16> added = {};
      if (bias != nullptr) added = load_raw(bias, span);
      const Floats shift = widened(added);
      Floats normed;
      for (int i = 0; i < packet; ++i) normed.x[i] = numerics::fma(v.x[i] * rstd, w.x[i], shift.x[i]);
      magnitude.store(out, span, normed);
    });
  }
  magnitude.write(magnitudes);
}

void norm(const char* name, TensorView x, NormWeight weight, TensorView bias, MeasuredView y, TensorView mean,
          TensorView rstd, float eps, CUstream_st* stream) {
  const std::int64_t rows = x.shape[0], channels = x.shape[1];
  const bool all_aligned = aligned(x.data, weight.values.data, bias.data, y.values.data);
  const auto start = [&]<class T, bool by_warp, int held>() {
    const Geometry geometry = by_warp ? warp_row_geometry(rows) : row_geometry(rows, channels);
    with_finding(y.magnitude != nullptr, [&]<bool finds>(std::bool_constant<finds>) {
      launch(name, norm_kernel<T, Team<by_warp>, held, finds>, measured(geometry, y), stream, x.as<T>(),
             weight.values.as<bf16>(), weight.offset, optional<bf16>(bias), y.values.as<T>(), largest_of(y),
             optional<float>(mean), rstd.as<float>(), eps, rows, channels, all_aligned && whole_packets<T>(channels));
    });
  };
  // A warp needs no barriers. Its lanes could hold longer rows too, but in so many registers that too few warps would
  // run to hide what one of them waits for. Who shares a row depends on its length alone, since the sums do.
  const std::int64_t of_lane = ceil_div(channels, packet * warp_lanes),
                     of_thread = ceil_div(channels, packet * most_threads);
  const bool all_wide = all_aligned && channels % packet == 0;
  with_activation(x.dtype, [&]<class T>(T) {
    if (of_lane <= 4) {
      if (!all_wide) return start.template operator()<T, true, 0>();
      if (of_lane <= 1) return start.template operator()<T, true, 1>();
      return start.template operator()<T, true, 4>();
    }
    if (!all_wide || of_thread > 4) return start.template operator()<T, false, 0>();
    if (of_thread <= 1) return start.template operator()<T, false, 1>();
    if (of_thread <= 2) return start.template operator()<T, false, 2>();
    start.template operator()<T, false, 4>();
  });
}

}  // namespace

void layer_norm(TensorView x, TensorView weight, TensorView bias, MeasuredView y, TensorView mean, TensorView rstd,
                float eps, CUstream_st* stream) {
  norm("layer_norm", x, weight, bias, y, mean, rstd, eps, stream);
}

void rms_norm(TensorView x, NormWeight weight, MeasuredView y, TensorView rstd, float eps, CUstream_st* stream) {
  norm("rms_norm", x, weight, {}, y, {}, rstd, eps, stream);
}

}  // namespace tandem::gpu
