// Backward of LayerNorm and RMSNorm in one pass over memory: dx, and the sums over rows that are the gradients of
// weight and bias. Rows are cut into parts, a function of shapes alone. A block walks the rows of its part with the
// same channels in the same threads, so that their sums stay in registers until its last row, and reads what the next
// row needs while it computes one. Rows too long for registers take two passes.
#include <algorithm>

#include "core/memory/memory.hpp"
#include "gpu_ops/base/kernels.hpp"
#include "gpu_ops/base/launch.hpp"
#include "gpu_ops/base/scratch.hpp"
#include "gpu_ops/kernels/block_sums.hpp"
#include "gpu_ops/kernels/elements.hpp"

namespace tandem::gpu {
namespace {

/// Packets of a row, and of the sums of its columns, that a thread can hold in its registers.
constexpr int held_packets(DType dtype, bool centred) { return dtype == DType::bf16 && !centred ? 4 : 2; }
static_assert(std::int64_t{held_packets(DType::bf16, false)} * packet * most_threads == longest_held_norm);

/// Operands of a NormBackward. Gradients of weight and bias go to parts, (parts, channels) each, null where they are
/// not asked for.
template <class T>
struct Operands {
  const T *dy, *x;
  const bf16* weight;
  float offset;                ///< added to the weight
  const float *means, *rstds;  ///< means: null for RMSNorm
  T* dx;
  float *weight_parts, *bias_parts;
  std::int64_t rows, channels;
  Cut cut;
  bool accumulate, aligned;
};

/// The formulas of a row, g = dy weight and n the normalised x: dx = rstd (g - mean(g) - n mean(g n)), mean(g) only
/// where the norm is centred.
template <bool centred>
struct Formulas {
  float mean, rstd;
  float of_g = 0.0F, of_n = 0.0F;  ///< rstd mean(g), rstd mean(g n)

  TANDEM_DEVICE float normalised(float x) const { return centred ? (x - mean) * rstd : x * rstd; }
  TANDEM_DEVICE float input_gradient(float g, float n) const {
    const float direct = centred ? numerics::fma(g, rstd, -of_g) : g * rstd;
    return numerics::fma(n, -of_n, direct);
  }
};

/// Statistics of a row.
struct RowStatistics {
  float mean, rstd;
};
template <bool centred, class T>
TANDEM_DEVICE RowStatistics statistics_of(const Operands<T>& n, std::int64_t row) {
  return {centred ? n.means[row] : 0.0F, n.rstds[row]};
}

/// A thread's packets of its rows, one row at hand and the next ones on their way: in shared memory, since in registers
/// a block would fill a multiprocessor, and nothing would run while its warps wait for each other. A thread copies and
/// reads its own packets alone, so that it needs no barrier.
template <class T, bool accumulate, int held>
class RowQueue {
 public:
  enum Operand { of_dy, of_x, of_dx };
  static constexpr int operands = accumulate ? 3 : 2;
  /// Rows in flight: three where a row has one packet a thread, so that as many bytes are on their way.
  static constexpr int rows = held == 1 ? 3 : 2;
  /// Bytes of shared memory for each thread of the block.
  static constexpr std::size_t bytes = sizeof(Raw<T>) * rows * operands * held;

  TANDEM_DEVICE RowQueue(const Operands<T>& n, Words* memory) : n_(n), memory_(memory) {}

  /// Sets a row on its way, the thread's `turn`-th.
  TANDEM_DEVICE void start(std::int64_t row, const Span* spans, std::int64_t turn) const {
    for (int operand = 0; operand < operands; ++operand) {
      TANDEM_UNROLL
      for (int k = 0; k < held; ++k) {
        const T* const from = row_of(operand, row);
        if (spans[k].wide) {
          for (int i = 0; i < parts; ++i) {
            start_copy(place(operand, k, i, turn), from + spans[k].at + i * (packet / parts));
          }
        } else {
          const Raw<T> raw = load_raw(from, spans[k]);
          for (int i = 0; i < parts; ++i) store_words(place(operand, k, i, turn), raw.part[i]);
        }
      }
    }
  }

  /// Packet k of an operand's row, once it has arrived.
  TANDEM_DEVICE Floats get(Operand operand, int k, std::int64_t turn) const {
    Raw<T> raw;
    for (int i = 0; i < parts; ++i) raw.part[i] = load_words(place(operand, k, i, turn));
    return widened(raw);
  }

 private:
  static constexpr int parts = Raw<T>::parts;
  TANDEM_DEVICE const T* row_of(int operand, std::int64_t row) const {
    return (operand == of_dy ? n_.dy : operand == of_x ? n_.x : n_.dx) + row * n_.channels;
  }
  TANDEM_DEVICE Words* place(int operand, int k, int part, std::int64_t turn) const {
    const int at = ((static_cast<int>(turn % rows) * operands + operand) * held + k) * parts + part;
    return memory_ + at * block_size() + thread_index();
  }

  const Operands<T>& n_;
  Words* memory_;
};

/// Sums of g and of g n over a row.
struct RowSums {
  float g, gn;
};

/// Adds eight shared floats, in order.
TANDEM_DEVICE float sum_of(const float* room) {
  static_assert(most_warps == packet);
  const Floats of_warps = wide_load(room);
  float sum = of_warps.x[0];
  for (int warp = 1; warp < most_warps; ++warp) sum = sum + of_warps.x[warp];
  return sum;
}

/// Shared floats of row_sums(), zeroed by all threads of the block: of warps that it does not have they stay so.
constexpr int sums_room = 4 * most_warps;
TANDEM_DEVICE void clear_room(float* room) {
  for (int i = thread_index(); i < sums_room; i += block_size()) room[i] = 0.0F;
  barrier();
}

/// Shared floats of norm_backward_kernel() beside its queue.
template <bool by_warp>
constexpr int sums_floats = by_warp ? columns_room : sums_room;

/// Sums over the warp or the block that shares a row, returned in every thread: lanes pairwise, then warps in order.
/// All threads call it, for the `turn`-th row: those of a block use halves of the room in turns, so that one that is
/// late to read a half finds it untouched while the next row is summed.
template <bool by_warp, bool centred>
TANDEM_DEVICE RowSums row_sums(RowSums sums, float* room, std::int64_t turn) {
  if constexpr (centred) sums.g = warp_sum(sums.g);
  sums.gn = warp_sum(sums.gn);
  if constexpr (by_warp) return sums;
  float* const half = room + turn % 2 * (2 * most_warps);
  if (thread_index() % warp_lanes == 0) {
    if constexpr (centred) half[most_warps + thread_index() / warp_lanes] = sums.g;
    half[thread_index() / warp_lanes] = sums.gn;
  }
  barrier();
  return {centred ? sum_of(half + most_warps) : 0.0F, sum_of(half)};
}

/// `by_warp`: each warp has a row of its own, `held` is 1 and the block whole; else the block shares one, of which a
/// thread has at most `held` packets.
template <class T, bool by_warp, bool centred, bool accumulate, int held>
TANDEM_KERNEL_BY(most_threads, held <= 2 ? 2 : 1)
norm_backward_kernel(Operands<T> n) {
  TANDEM_DYNAMIC_SHARED(float, room);  // with the queue behind it
  if constexpr (!by_warp) clear_room(room);
  const int team = by_warp ? warp_lanes : block_size();
  const std::int64_t begin = block_index() * n.cut.size, step = by_warp ? block_size() / warp_lanes : 1;
  const std::int64_t end = begin + n.cut.size < n.rows ? begin + n.cut.size : n.rows;
  const float inverse = numerics::div(1.0F, static_cast<float>(n.channels));
  Span spans[held];
  Raw<bf16> weights[held];  // widened where they are used: half the registers
  Floats dweight[held] = {}, dbias[held] = {};
  TANDEM_UNROLL
  for (int k = 0; k < held; ++k) {
    spans[k] = span_at((k * std::int64_t{team} + thread_index() % team) * packet, n.channels, n.aligned);
    weights[k] = load_raw(n.weight, spans[k]);
  }
  std::int64_t row = begin + thread_index() / team;
  using Queue = RowQueue<T, accumulate, held>;
  const Queue queue(n, reinterpret_cast<Words*>(room + sums_floats<by_warp>));
  for (int ahead = 0; ahead < Queue::rows - 1; ++ahead) {
    if (row + ahead * step < end) queue.start(row + ahead * step, spans, ahead);
    close_copies();
  }
  RowStatistics next{};
  if (row < end) next = statistics_of<centred>(n, row);
  for (std::int64_t turn = 0; row < end; row += step, ++turn) {
    Formulas<centred> of{next.mean, next.rstd};
    if (row + step < end) next = statistics_of<centred>(n, row + step);
    constexpr int ahead = Queue::rows - 1;
    if (row + ahead * step < end) queue.start(row + ahead * step, spans, turn + ahead);
    close_copies();
    await_copies<ahead>();
    RowSums sums = {0.0F, 0.0F};
    TANDEM_UNROLL
    for (int k = 0; k < held; ++k) {
      const Floats dy = queue.get(Queue::of_dy, k, turn), x = queue.get(Queue::of_x, k, turn);
      const Floats w = widened_plus(weights[k], n.offset);
      for (int i = 0; i < packet; ++i) {
        const float g = dy.x[i] * w.x[i];
        if constexpr (centred) sums.g = sums.g + g;
        sums.gn = numerics::fma(g, of.normalised(x.x[i]), sums.gn);
      }
    }
    sums = row_sums<by_warp, centred>(sums, room, turn);
    of.of_g = inverse * sums.g * of.rstd;
    of.of_n = inverse * sums.gn * of.rstd;
    TANDEM_UNROLL
    for (int k = 0; k < held; ++k) {
      const Floats dy = queue.get(Queue::of_dy, k, turn), x = queue.get(Queue::of_x, k, turn);
      const Floats w = widened_plus(weights[k], n.offset);
      Floats out;
      for (int i = 0; i < packet; ++i) {
        const float normalised = of.normalised(x.x[i]);
        dweight[k].x[i] = numerics::fma(dy.x[i], normalised, dweight[k].x[i]);
        if constexpr (centred) dbias[k].x[i] = dbias[k].x[i] + dy.x[i];
        out.x[i] = of.input_gradient(dy.x[i] * w.x[i], normalised);
      }
      if constexpr (accumulate) {
        const Floats before = queue.get(Queue::of_dx, k, turn);
        for (int i = 0; i < packet; ++i) out.x[i] = before.x[i] + out.x[i];
      }
      store(n.dx + row * n.channels, spans[k], out);
    }
  }
  const auto write = [&](const Floats* sums, float* parts) {
    if (parts == nullptr) return;
    float* const part = parts + block_index() * n.channels;
    if constexpr (by_warp) {
      write_part(sums[0], room, 0, n.channels, part);
    } else {
      TANDEM_UNROLL
      for (int k = 0; k < held; ++k) store(part, spans[k], sums[k]);
    }
  };
  write(dweight, n.weight_parts);
  if constexpr (centred) write(dbias, n.bias_parts);
}

/// dx of rows of any length, read twice. A block for each row.
template <class T, bool centred>
TANDEM_KERNEL(most_threads)
long_norm_backward_kernel(Operands<T> n) {
  TANDEM_SHARED(float, room, sums_room);
  clear_room(room);
  const float inverse = numerics::div(1.0F, static_cast<float>(n.channels));
  std::int64_t turn = 0;
  for (std::int64_t row = block_index(); row < n.rows; row += grid_size(), ++turn) {
    const T* const dy = n.dy + row * n.channels;
    const T* const x = n.x + row * n.channels;
    T* const dx = n.dx + row * n.channels;
    Formulas<centred> of{centred ? n.means[row] : 0.0F, n.rstds[row]};
    RowSums sums = {0.0F, 0.0F};
    for_row_spans(n.channels, n.aligned, [&](const Span& span) {
      const Floats d = load(dy, span), v = load(x, span), w = widened_plus(load_raw(n.weight, span), n.offset);
      for (int i = 0; i < packet; ++i) {
        const float g = d.x[i] * w.x[i];
        sums.g = sums.g + g;
        sums.gn = numerics::fma(g, of.normalised(v.x[i]), sums.gn);
      }
    });
    sums = row_sums<false, centred>(sums, room, turn);
    of.of_g = inverse * sums.g * of.rstd;
    of.of_n = inverse * sums.gn * of.rstd;
    for_row_spans(n.channels, n.aligned, [&](const Span& span) {
      const Floats d = load(dy, span), v = load(x, span), w = widened_plus(load_raw(n.weight, span), n.offset);
      Floats out;
      for (int i = 0; i < packet; ++i) out.x[i] = of.input_gradient(d.x[i] * w.x[i], of.normalised(v.x[i]));
      if (n.accumulate) {
        const Floats before = load(dx, span);
        for (int i = 0; i < packet; ++i) out.x[i] = before.x[i] + out.x[i];
      }
      store(dx, span, out);
    });
  }
}

/// f.template operator()<value>()
template <class F>
void with_flag(bool value, const F& f) {
  if (value) return f.template operator()<true>();
  f.template operator()<false>();
}

template <class T>
void start_held(const Operands<T>& n, CUstream_st* stream) {
  const auto start = [&]<bool by_warp, bool centred, int held>() {
    with_flag(n.accumulate, [&]<bool accumulate>() {
      const int threads = by_warp ? most_threads : row_geometry(n.rows, n.channels).block;
      launch("norm_backward", norm_backward_kernel<T, by_warp, centred, accumulate, held>,
             Geometry{n.cut.parts, threads,
                      sums_floats<by_warp> * sizeof(float) +
                          static_cast<std::size_t>(threads) * RowQueue<T, accumulate, held>::bytes},
             stream, n);
    });
  };
  const std::int64_t of_thread = ceil_div(n.channels, packet * most_threads);
  with_flag(n.means != nullptr, [&]<bool centred>() {
    if (n.channels <= warp_norm_channels) return start.template operator()<true, centred, 1>();
    if (of_thread <= 1) return start.template operator()<false, centred, 1>();
    if (of_thread <= 2) return start.template operator()<false, centred, 2>();
    if constexpr (sizeof(T) == sizeof(bf16) && !centred) start.template operator()<false, centred, 4>();
  });
}

template <class T>
void start_long(const Operands<T>& n, CUstream_st* stream) {
  with_flag(n.means != nullptr, [&]<bool centred>() {
    launch("long_norm_backward", long_norm_backward_kernel<T, centred>, row_geometry(n.rows, n.channels), stream, n);
  });
}

}  // namespace

void norm_backward(const NormBackward& g, void* scratch, CUstream_st* stream) {
  const std::int64_t rows = g.x.shape[0], channels = g.x.shape[1];
  if (rows == 0) return;
  const bool held = channels <= packet * most_threads * held_packets(g.x.dtype, static_cast<bool>(g.mean));
  // Before dx, which may lie where dy does.
  if (!held) add_norm_column_sums(g, scratch, stream);
  const Cut cut = norm_cut(rows, channels);
  auto* const weight_parts = static_cast<float*>(scratch);
  auto* const bias_parts =
      weight_parts + align_up(static_cast<std::size_t>(cut.parts * channels) * sizeof(float)) / sizeof(float);
  with_activation(g.x.dtype, [&]<class T>(T) {
    const Operands<T> n{
        .dy = g.dy.as<T>(),
        .x = g.x.as<T>(),
        .weight = g.weight.values.as<bf16>(),
        .offset = g.weight.offset,
        .means = optional<float>(g.mean),
        .rstds = g.rstd.as<float>(),
        .dx = g.dx.as<T>(),
        .weight_parts = g.dweight ? weight_parts : nullptr,
        .bias_parts = g.dbias ? bias_parts : nullptr,
        .rows = rows,
        .channels = channels,
        .cut = cut,
        .accumulate = g.accumulate,
        .aligned = whole_packets<T>(channels) && aligned(g.dy.data, g.x.data, g.weight.values.data, g.dx.data)};
    held ? start_held(n, stream) : start_long(n, stream);
  });
  if (held)
    add_parts({weight_parts, optional<float>(g.dweight)}, {bias_parts, optional<float>(g.dbias)}, cut.parts, channels,
              stream);
}

}  // namespace tandem::gpu
