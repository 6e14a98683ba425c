// Frozen weights in other formats to bf16: one pass, bound by memory. A thread takes a packet of elements, which share
// a scale where rows and matrices are whole packets.
#include "core/numerics/weight_codes.hpp"
#include "core/tensor/coded_shape.hpp"
#include "gpu_ops/base/kernels.hpp"
#include "gpu_ops/base/launch.hpp"
#include "gpu_ops/kernels/elements.hpp"

namespace tandem::gpu {
namespace {

/// A coded weight, and what finds the scale of a packet.
struct Coded {
  const std::byte* codes;
  const float* scales;
  CodedShape shape;
  Divisor row_packets, rows;
  bool whole;  ///< the elements of every packet share a scale
};

/// Tables in shared memory, of NF4 alone: numbers of the codes, and of the bytes of scales.
struct Tables {
  const float* relative;
  const float* of_byte;
};

constexpr bool is_nf4(WeightCode code) { return code == WeightCode::nf4 || code == WeightCode::nf4_double; }

/// Number of the scale that a whole packet has.
template <WeightCode code>
TANDEM_DEVICE std::int64_t scale_of_packet(const Coded& c, std::int64_t at) {
  if constexpr (is_nf4(code)) return at / nf4_block;
  const auto number = static_cast<std::uint32_t>(at / packet);
  const std::uint32_t row = c.row_packets.quotient(number);
  if constexpr (code == WeightCode::int8) return row;
  const std::uint32_t matrix = c.rows.quotient(row), column = c.row_packets.remainder(number) * packet;
  const std::int64_t wide = numerics::parts_of(c.shape.columns, fp8_side);
  const std::int64_t high = numerics::parts_of(c.shape.rows, fp8_side);
  return (matrix * high + c.rows.remainder(row) / fp8_side) * wide + column / fp8_side;
}

template <WeightCode code>
TANDEM_DEVICE float scale_value(const Coded& c, const Tables& tables, std::int64_t number) {
  if constexpr (code == WeightCode::nf4_double) {
    const numerics::Nf4Scales blocks = numerics::nf4_scales(code, c.shape, c.scales);
    return numerics::absmax_of_byte(blocks, number, tables.of_byte[blocks.bytes[number]]);
  }
  return c.scales[number];
}

/// Codes of a packet as they lie in memory; of NF4 in the first word.
template <WeightCode code>
TANDEM_DEVICE TwoWords load_codes(const std::byte* codes, const Span& span) {
  constexpr int bits = code_bits(code);
  const auto* const from = reinterpret_cast<const std::uint8_t*>(codes) + span.at * bits / 8;
  if (span.wide) {
    if constexpr (bits == 8) return load_two_words(from);
    return {{*reinterpret_cast<const std::uint32_t*>(from), 0}};
  }
  TwoWords both = {};
  TANDEM_UNROLL
  for (int i = 0; i < packet * bits / 8; ++i) {
    if (i * 8 < span.count * bits) both.word[i / 4] |= static_cast<std::uint32_t>(from[i]) << (i % 4 * 8);
  }
  return both;
}

/// Element `i` of a packet.
template <WeightCode code>
TANDEM_DEVICE float value_of(const TwoWords& codes, int i, const Tables& tables, float scale) {
  if constexpr (is_nf4(code)) {
    const std::uint32_t nibble = codes.word[0] >> (i / 2 * 8 + (i % 2 == 0 ? 4 : 0)) & 15u;
    return numerics::mul(tables.relative[nibble], scale);
  }
  const std::uint32_t byte = codes.word[i / 4] >> (i % 4 * 8) & 255u;
  if constexpr (code == WeightCode::int8) return numerics::int8_value(static_cast<std::int8_t>(byte), scale);
  return numerics::fp8_value(byte, scale);
}

template <WeightCode code>
TANDEM_KERNEL(most_threads)
decode_kernel(Coded c, bf16* weight, std::int64_t count, bool aligned) {
  TANDEM_SHARED(float, relative, numerics::nf4_codes);
  TANDEM_SHARED(float, of_byte, 256);
  const Tables tables{relative, of_byte};
  if constexpr (is_nf4(code)) {
    TANDEM_UNROLL
    for (int i = 0; i < static_cast<int>(numerics::nf4_codes); ++i) {
      if (thread_index() == i) relative[i] = numerics::nf4_relative(static_cast<std::uint32_t>(i));
    }
    if constexpr (code == WeightCode::nf4_double) {
      for (int i = thread_index(); i < 256; i += block_size()) {
        of_byte[i] = numerics::scale_of_byte(static_cast<std::uint32_t>(i));
      }
    }
    barrier();
  }
  for_spans(count, aligned, [&](const Span& span) {
    const TwoWords codes = load_codes<code>(c.codes, span);
    Floats p = {};
    if (c.whole) {
      const float scale = scale_value<code>(c, tables, scale_of_packet<code>(c, span.at));
      TANDEM_UNROLL
      for (int i = 0; i < packet; ++i) p.x[i] = value_of<code>(codes, i, tables, scale);
    } else {
      TANDEM_UNROLL
      for (int i = 0; i < packet; ++i) {
        if (i >= span.count) continue;
        const std::int64_t number = numerics::scale_run(code, c.shape, span.at + i).scale;
        p.x[i] = value_of<code>(codes, i, tables, scale_value<code>(c, tables, number));
      }
    }
    store(weight, span, p);
  });
}

template <WeightCode code>
void launch_decode(const CodedWeight& from, TensorView weight, CUstream_st* stream) {
  const CodedShape shape = coded_shape(weight.shape);
  const std::int64_t each = shape.rows * shape.columns;
  const bool whole = is_nf4(code) ? shape.matrices == 1 || each % nf4_block == 0 : shape.columns % packet == 0;
  numbered_items("decode", ceil_div(shape.count(), packet));
  const Coded coded{from.codes, from.scales, shape, divisor_by(shape.columns / packet), divisor_by(shape.rows), whole};
  launch("decode", decode_kernel<code>, pointwise_geometry(shape.count()), stream, coded, weight.as<bf16>(),
         shape.count(), aligned(weight.data, from.codes));
}

}  // namespace

void decode(const CodedWeight& from, TensorView weight, CUstream_st* stream) {
  switch (from.code) {
    case WeightCode::none:
      break;
    case WeightCode::int8:
      return launch_decode<WeightCode::int8>(from, weight, stream);
    case WeightCode::nf4:
      return launch_decode<WeightCode::nf4>(from, weight, stream);
    case WeightCode::nf4_double:
      return launch_decode<WeightCode::nf4_double>(from, weight, stream);
    case WeightCode::fp8:
      return launch_decode<WeightCode::fp8>(from, weight, stream);
  }
}

}  // namespace tandem::gpu
