// Matrices of bf16 to eight-bit floating point (base/fp8_matrix.hpp): a pass finds the largest magnitude of each part,
// unless whoever wrote the matrix has; another one the largest of these, and writes the codes, as they lie, transposed,
// or both. Bound by memory.
#include "gpu_ops/base/kernels.hpp"
#include "gpu_ops/base/launch.hpp"
#include "gpu_ops/kernels/magnitude.hpp"

namespace tandem::gpu {
namespace {

template <class T>
TANDEM_KERNEL(most_threads)
fp8_maximum_kernel(const T* x, std::int64_t count, Largest* largest, bool aligned) {
  TANDEM_SHARED(std::uint32_t, room, most_warps);
  Magnitude<true> magnitude(largest);
  for_spans(count, aligned, [&](const Span& span) { magnitude.add(span, load(x, span)); });
  magnitude.write(room);
}

/// Exponent of a matrix, and whether its elements are finite.
struct Scale {
  int e;
  bool finite;
};

/// The scale, from the largest magnitudes of all parts.
template <class Format>
TANDEM_DEVICE Scale scale_of(const Largest* largest, std::uint32_t* room) {
  std::uint32_t seen = 0;
  const auto parts = static_cast<int>(largest->parts);
  for (int i = thread_index(); i < parts; i += block_size()) seen = larger(seen, largest->part[i]);
  const std::uint32_t magnitude = block_maximum(seen, room);
  const bool finite = magnitude < numerics::fp8_not_finite;
  return {finite ? numerics::fp8_exponent<Format>(magnitude) : 0, finite};
}

/// Codes of a packet, the first one in the lowest byte.
template <class Format>
TANDEM_DEVICE TwoWords codes_of(const Floats& p, const Scale& scale) {
  TwoWords codes = {};
  TANDEM_UNROLL
  for (int i = 0; i < packet; ++i) {
    const std::uint32_t code =
        scale.finite ? numerics::to_scaled_fp8<Format>(p.x[i], scale.e) : numerics::fp8_nan_code<Format>();
    codes.word[i / 4] |= code << (i % 4 * 8);
  }
  return codes;
}

TANDEM_DEVICE void write_scale(const Scale& scale, float* to) {
  if (block_index() == 0 && thread_index() == 0) *to = numerics::fp8_power(scale.e);
}

/// Codes as the elements lie. Counts are whole packets.
template <class Format, class T>
TANDEM_KERNEL(most_threads)
fp8_codes_kernel(const T* x, std::int64_t count, const Largest* largest, std::uint8_t* codes, float* scale,
                 bool aligned) {
  TANDEM_SHARED(std::uint32_t, room, most_warps);
  const Scale s = scale_of<Format>(largest, room);
  write_scale(s, scale);
  for_spans(count, aligned,
            [&](const Span& span) { store_two_words(codes + span.at, codes_of<Format>(load(x, span), s)); });
}

/// Rows and columns of a tile that passes through shared memory, and its packets.
constexpr int fp8_tile = 64;
constexpr int fp8_tile_packets = fp8_tile / packet;
/// Bytes from one row of a tile to the next: neighbouring rows begin in different banks.
constexpr int fp8_pitch = fp8_tile + 4;

/// Codes transposed, and, where `codes` is not null, as the elements lie. Rows and columns are multiples of 16.
template <class Format, class T>
TANDEM_KERNEL(most_threads)
fp8_transposed_kernel(const T* x, std::int64_t rows, std::int64_t columns, const Largest* largest, std::uint8_t* codes,
                      std::uint8_t* transposed, float* scale, bool aligned) {
  TANDEM_SHARED(std::uint32_t, room, most_warps);
  TANDEM_SHARED(std::uint8_t, tile, fp8_tile * fp8_pitch);
  const Scale s = scale_of<Format>(largest, room);
  write_scale(s, scale);
  const std::int64_t across = ceil_div(columns, fp8_tile), tiles = across * ceil_div(rows, fp8_tile);
  for (std::int64_t index = block_index(); index < tiles; index += grid_size()) {
    const std::int64_t row = index / across * fp8_tile, column = index % across * fp8_tile;
    for (int p = thread_index(); p < fp8_tile * fp8_tile_packets; p += block_size()) {
      const int r = p / fp8_tile_packets, c = p % fp8_tile_packets * packet;
      if (row + r >= rows || column + c >= columns) continue;
      const std::int64_t at = (row + r) * columns + column + c;
      const TwoWords of_packet = codes_of<Format>(load(x, Span{at, packet, aligned}), s);
      if (codes != nullptr) store_two_words(codes + at, of_packet);
      TANDEM_UNROLL
      for (int i = 0; i < packet; ++i) {
        tile[r * fp8_pitch + c + i] = static_cast<std::uint8_t>(of_packet.word[i / 4] >> (i % 4 * 8));
      }
    }
    barrier();
    for (int p = thread_index(); p < fp8_tile * fp8_tile_packets; p += block_size()) {
      const int c = p / fp8_tile_packets, r = p % fp8_tile_packets * packet;
      if (row + r >= rows || column + c >= columns) continue;
      TwoWords of_column = {};
      TANDEM_UNROLL
      for (int i = 0; i < packet; ++i) {
        of_column.word[i / 4] |= static_cast<std::uint32_t>(tile[(r + i) * fp8_pitch + c]) << (i % 4 * 8);
      }
      store_two_words(transposed + (column + c) * rows + row + r, of_column);
    }
    barrier();
  }
}

template <class T>
void find_largest(TensorView x, Largest* to, CUstream_st* stream) {
  launch("fp8_maximum", fp8_maximum_kernel<T>, measured(pointwise_geometry(x.count()), {x, to}), stream, x.as<T>(),
         x.count(), to, aligned(x.data));
}

template <class Format, class T>
void launch_quantize(const MeasuredView& of, const Fp8Matrix& to, CUstream_st* stream) {
  const Fp8Parts m = parts_of(to);
  const TensorView& x = of.values;
  const T* const from = x.as<T>();
  if (of.magnitude == nullptr) find_largest<T>(x, m.largest, stream);
  const Largest* const largest = of.magnitude == nullptr ? m.largest : largest_of(of);
  if (m.transposed == nullptr) {
    launch("fp8_codes", fp8_codes_kernel<Format, T>, pointwise_geometry(x.count()), stream, from, x.count(), largest,
           m.codes, m.scale, aligned(x.data));
    return;
  }
  const std::int64_t tiles = ceil_div(to.rows, fp8_tile) * ceil_div(to.columns, fp8_tile);
  launch("fp8_transposed", fp8_transposed_kernel<Format, T>, Geometry{blocks_for(tiles, 1), most_threads}, stream, from,
         to.rows, to.columns, largest, m.codes, m.transposed, m.scale, aligned(x.data));
}

}  // namespace

void quantize(MeasuredView x, const Fp8Matrix& to, CUstream_st* stream) {
  with_activation(x.values.dtype, [&]<class T>(T) {
    if (to.format == Fp8Format::e4m3) return launch_quantize<numerics::E4m3, T>(x, to, stream);
    launch_quantize<numerics::E5m2, T>(x, to, stream);
  });
}

void measure(MeasuredView x, CUstream_st* stream) {
  with_activation(x.values.dtype, [&]<class T>(T) { find_largest<T>(x.values, largest_of(x), stream); });
}

}  // namespace tandem::gpu
