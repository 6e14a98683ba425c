// Optimizer arithmetic: the formulas of core/numerics, so that the device and the CPU give the same bits. One
// pass over memory, one launch a call.
#include <cmath>

#include "core/numerics/adam_state.hpp"
#include "core/numerics/norm_block.hpp"
#include "gpu_ops/base/kernels.hpp"
#include "gpu_ops/base/launch.hpp"
#include "gpu_ops/kernels/elements.hpp"

namespace tandem::gpu {
namespace {

/// Asks once whether there is a NaN, not of each.
TANDEM_DEVICE Packet<bf16> weights_of(const Floats& master) {
  Packet<bf16> weight;
  if (all_numbers(master)) {
    for (int i = 0; i < packet; ++i) weight.x[i] = numerics::weight_of_number(master.x[i]);
  } else {
    for (int i = 0; i < packet; ++i) weight.x[i] = numerics::weight_of_master(master.x[i]);
  }
  return weight;
}

/// The upper halves of fp32 bits, which is how `load` widens 16-bit values.
TANDEM_DEVICE std::uint16_t half_of(float widened) {
  return static_cast<std::uint16_t>(numerics::float_bits(widened) >> 16);
}

template <StateFormat format>
TANDEM_DEVICE Floats load_master(const AdamPiece& p, const Span& span) {
  if constexpr (format == StateFormat::fp32) {
    return load(static_cast<const float*>(p.state.master), span);
  } else if constexpr (has_fp32_weights(format)) {
    return load(static_cast<const float*>(p.fp32_weight), span);
  } else {
    Floats master = load(static_cast<const bf16*>(p.weight), span);
    const Floats residual = load(static_cast<const bf16*>(p.state.master), span);
    for (int i = 0; i < packet; ++i) {
      master.x[i] = numerics::join_master(bf16{half_of(master.x[i])}, half_of(residual.x[i]));
    }
    return master;
  }
}

template <StateFormat format>
TANDEM_DEVICE void store_master(const AdamPiece& p, const Span& span, const Floats& master) {
  if constexpr (has_fp32_weights(format)) {
    store_exactly(p.fp32_weight, span, master);
  } else if constexpr (format == StateFormat::fp32) {
    store_exactly(static_cast<float*>(p.state.master), span, master);
  } else {
    Packet<bf16> residual;
    for (int i = 0; i < packet; ++i) residual.x[i] = bf16{numerics::master_residual(master.x[i])};
    store_exactly(static_cast<bf16*>(p.state.master), span, residual);
  }
}

template <StateFormat format>
TANDEM_DEVICE Floats load_gradient(const AdamPiece& p, const Span& span) {
  if constexpr (has_fp32_weights(format)) {
    return load(p.fp32_gradient, span);
  } else {
    return load(p.gradient, span);
  }
}

template <StateFormat format>
TANDEM_DEVICE Floats load_moment(const void* moment, const Span& span) {
  if constexpr (format == StateFormat::bf16_moments) {
    return load(static_cast<const bf16*>(moment), span);
  } else {
    return load(static_cast<const float*>(moment), span);
  }
}

/// numerics::moment_bits of a span: a block of random bits serves several of its elements.
TANDEM_DEVICE Packet<std::uint32_t> random_of(const AdamCoefficients& c, std::uint64_t first) {
  Packet<std::uint32_t> random;
  constexpr int each = static_cast<int>(numerics::elements_per_block);
  if (first % numerics::elements_per_block != 0) {
    for (int i = 0; i < packet; ++i)
      random.x[i] = numerics::moment_bits(c.seed, c.step, first + static_cast<unsigned>(i));
    return random;
  }
  for (int b = 0; b < packet / each; ++b) {
    const numerics::Philox128 block =
        numerics::moment_block(c.seed, c.step, first / numerics::elements_per_block + static_cast<unsigned>(b));
    for (int i = 0; i < each; ++i) random.x[b * each + i] = block.word[i];
  }
  return random;
}

template <StateFormat format>
TANDEM_DEVICE void store_moments(const AdamPiece& p, const Span& span, const Floats& m, const Floats& v,
                                 const AdamCoefficients& c) {
  if constexpr (format == StateFormat::bf16_moments) {
    const Packet<std::uint32_t> random = random_of(c, p.index + static_cast<std::uint64_t>(span.at));
    Packet<bf16> m_rounded, v_rounded;
    for (int i = 0; i < packet; ++i) {
      m_rounded.x[i] = numerics::round_stochastically(m.x[i], random.x[i] & 0xffffu);
      v_rounded.x[i] = numerics::round_stochastically(v.x[i], random.x[i] >> 16);
    }
    store_exactly(static_cast<bf16*>(p.state.m), span, m_rounded);
    store_exactly(static_cast<bf16*>(p.state.v), span, v_rounded);
  } else {
    store_exactly(static_cast<float*>(p.state.m), span, m);
    store_exactly(static_cast<float*>(p.state.v), span, v);
  }
}

template <StateFormat format>
TANDEM_KERNEL_BY(most_threads, 4)
adamw_kernel(AdamPiece p, AdamCoefficients c, bool aligned) {
  for_spans(p.count, aligned, [&](const Span& span) {
    Floats master = load_master<format>(p, span);
    Floats m = load_moment<format>(p.state.m, span), v = load_moment<format>(p.state.v, span);
    const Floats gradient = load_gradient<format>(p, span);
    for (int i = 0; i < packet; ++i) {
      const numerics::AdamElement next = numerics::adamw({master.x[i], m.x[i], v.x[i]}, gradient.x[i], c);
      master.x[i] = next.master;
      m.x[i] = next.m;
      v.x[i] = next.v;
    }
    store_master<format>(p, span, master);
    store_moments<format>(p, span, m, v, c);
    if constexpr (!has_fp32_weights(format)) store_exactly(p.weight, span, weights_of(master));
  });
}

template <StateFormat format>
TANDEM_KERNEL_BY(most_threads, 4)
lion_kernel(AdamPiece p, AdamCoefficients c, bool aligned) {
  for_spans(p.count, aligned, [&](const Span& span) {
    Floats master = load_master<format>(p, span);
    Floats m = load_moment<format>(p.state.m, span);
    const Floats gradient = load_gradient<format>(p, span);
    for (int i = 0; i < packet; ++i) {
      const numerics::LionElement next = numerics::lion({master.x[i], m.x[i]}, gradient.x[i], c);
      master.x[i] = next.master;
      m.x[i] = next.m;
    }
    store_master<format>(p, span, master);
    store_exactly(static_cast<float*>(p.state.m), span, m);
    if constexpr (!has_fp32_weights(format)) store_exactly(p.weight, span, weights_of(master));
  });
}

// -- moments in a byte
// -------------------------------------------------------------------------------------------------
// core/numerics/moment_codes.hpp: the lanes of a block of codes find its largest together.

/// The codes of a span, of which `codes` is the first; zeros behind its end.
TANDEM_DEVICE TwoWords load_codes(const std::uint8_t* codes, const Span& span) {
  if (span.wide) return load_two_words(codes);
  TwoWords words{};
  for (int i = 0; i < packet; ++i) {
    if (i < span.count) words.word[i / 4] |= static_cast<std::uint32_t>(codes[i]) << i % 4 * 8;
  }
  return words;
}
TANDEM_DEVICE std::uint32_t code_of(const TwoWords& words, int i) { return words.word[i / 4] >> i % 4 * 8 & 0xffu; }

TANDEM_DEVICE void store_codes(std::uint8_t* codes, const Span& span, const TwoWords& words) {
  if (span.wide) return store_two_words(codes, words);
  for (int i = 0; i < packet; ++i) {
    if (i < span.count) codes[i] = static_cast<std::uint8_t>(code_of(words, i));
  }
}

/// The bits of the largest magnitude in the block of codes that the span belongs to.
TANDEM_DEVICE std::uint32_t largest_of_block(const Floats& x) {
  std::uint32_t largest = 0;
  for (int i = 0; i < packet; ++i) {
    const std::uint32_t magnitude = numerics::float_bits(x.x[i]) & 0x7fffffffu;
    largest = largest < magnitude ? magnitude : largest;
  }
  for (int distance = 1; distance < coded_block / packet; distance *= 2) {
    const std::uint32_t other = shuffle_xor(largest, distance);
    largest = largest < other ? other : largest;
  }
  return largest;
}

TANDEM_DEVICE void store_coded(const AdamPiece& p, const Span& span, const Floats& m, const Floats& v,
                               const AdamCoefficients& c) {
  const CodedBlock of_m = coded_block_at(p.state.m, span.at), of_v = coded_block_at(p.state.v, span.at);
  const std::uint32_t m_exponent = numerics::m_exponent(largest_of_block(m));
  const std::uint32_t v_exponent = numerics::v_exponent(largest_of_block(v));
  static_assert(packet == numerics::coded_elements_per_block);
  const numerics::Philox128 random =
      numerics::moment_block(c.seed, c.step, (p.index + static_cast<std::uint64_t>(span.at)) / packet);
  TwoWords m_codes{}, v_codes{};
  for (int i = 0; i < packet; ++i) {
    const std::uint32_t half = numerics::half_of_word(random.word[i / 2], i % 2);
    const std::uint32_t m_code = numerics::code_of_m(m.x[i], m_exponent, numerics::increment_of_m(half));
    const std::uint32_t v_code = numerics::code_of_v(v.x[i], v_exponent, numerics::increment_of_v(half));
    m_codes.word[i / 4] |= m_code << i % 4 * 8;
    v_codes.word[i / 4] |= v_code << i % 4 * 8;
  }
  // Asked of a block once: branches for each element would keep their instructions apart.
  constexpr std::uint32_t every_byte = 0x01010101u;
  for (int i = 0; i < packet / 4; ++i) {
    if (m_exponent == numerics::exponent_of_nan) m_codes.word[i] = numerics::m_code_of_nan * every_byte;
    if (v_exponent == numerics::exponent_of_nan) v_codes.word[i] = numerics::v_code_of_nan * every_byte;
  }
  store_codes(of_m.codes, span, m_codes);
  store_codes(of_v.codes, span, v_codes);
  if (span.at % coded_block == 0 && span.count > 0) {
    *of_m.exponent = static_cast<std::uint8_t>(m_exponent);
    *of_v.exponent = static_cast<std::uint8_t>(v_exponent);
  }
}

/// `all_wide`: all spans are, so that no access asks.
template <bool all_wide>
TANDEM_KERNEL_BY(most_threads, 4)
adamw_coded_kernel(AdamPiece p, AdamCoefficients c, bool aligned) {
  for_warp_spans(p.count, aligned, [&](const Span& any) {
    const Span span = all_wide ? Span{any.at, packet, true} : any;
    const CodedBlock of_m = coded_block_at(p.state.m, span.at), of_v = coded_block_at(p.state.v, span.at);
    const std::uint32_t m_exponent = *of_m.exponent, v_exponent = *of_v.exponent;
    const TwoWords m_codes = load_codes(of_m.codes, span), v_codes = load_codes(of_v.codes, span);
    Floats master = load_master<StateFormat::byte_moments>(p, span);
    const Floats gradient = load(p.gradient, span);
    Floats m, v;
    for (int i = 0; i < packet; ++i) {
      const numerics::AdamElement old{master.x[i], numerics::decode_m(code_of(m_codes, i), m_exponent),
                                      numerics::decode_v(code_of(v_codes, i), v_exponent)};
      const numerics::AdamElement next = numerics::adamw(old, gradient.x[i], c);
      master.x[i] = next.master;
      m.x[i] = next.m;
      v.x[i] = next.v;
    }
    store_master<StateFormat::byte_moments>(p, span, master);
    store_exactly(p.weight, span, weights_of(master));
    store_coded(p, span, m, v, c);
  });
}

TANDEM_KERNEL(most_threads)
weights_of_master_kernel(const float* master, bf16* weight, std::int64_t count, bool aligned) {
  for_spans(count, aligned, [&](const Span& span) { store_exactly(weight, span, weights_of(load(master, span))); });
}

template <class T>
TANDEM_KERNEL(most_threads)
accumulate_kernel(float* sum, const T* gradient, bool first, std::int64_t count, bool aligned) {
  for_spans(count, aligned, [&](const Span& span) {
    Floats next = load(gradient, span);
    if (!first) {
      const Floats before = load(sum, span);
      for (int i = 0; i < packet; ++i) next.x[i] = numerics::add(before.x[i], next.x[i]);
    }
    store_exactly(sum, span, next);
  });
}

TANDEM_KERNEL(most_threads) round_kernel(const float* sum, bf16* gradient, std::int64_t count, bool aligned) {
  for_spans(count, aligned, [&](const Span& span) { store(gradient, span, load(sum, span)); });
}

/// numerics::norm_block of fp32 gradients, which few parameters have: straight from memory.
TANDEM_KERNEL(most_threads)
fp32_norm_blocks_kernel(const float* gradient, std::int64_t count, double* partial) {
  const int lane = thread_index() % warp_lanes, warp = thread_index() / warp_lanes;
  const std::int64_t blocks = ceil_div(count, layout_quantum);
  for (std::int64_t b = block_index() * most_warps + warp; b < blocks; b += grid_size() * most_warps) {
    const std::int64_t end = count - b * layout_quantum < layout_quantum ? count : (b + 1) * layout_quantum;
    double sum = 0.0;
    for (std::int64_t i = b * layout_quantum + lane; i < end; i += warp_lanes) {
      const double g = static_cast<double>(gradient[i]);
      sum = std::fma(g, g, sum);
    }
    for (int distance = warp_lanes / 2; distance > 0; distance /= 2) sum += shuffle_down(sum, distance);
    if (lane == 0) partial[b] = sum;
  }
}

/// Copies the warp's block of the layout to shared memory, with zeros behind its end. A lane loads all of its packets
/// before it stores one, so that they are under way together.
TANDEM_DEVICE void stage_block(bf16* staged, const bf16* block, std::int64_t length, bool aligned, int lane) {
  constexpr int packets = static_cast<int>(layout_quantum) / (warp_lanes * packet);
  const auto place = [lane](int i) { return (i * warp_lanes + lane) * packet; };
  Raw<bf16> part[packets];
  if (aligned && length == layout_quantum) {
    TANDEM_UNROLL
    for (int i = 0; i < packets; ++i) part[i] = wide_load_raw(block + place(i));
  } else {
    TANDEM_UNROLL
    for (int i = 0; i < packets; ++i) part[i] = load_raw(block, span_at(place(i), length, false));
  }
  TANDEM_UNROLL
  for (int i = 0; i < packets; ++i) store_words(staged + place(i), part[i].part[0]);
}

/// numerics::norm_block, a warp for each block of the layout: its lanes are the formula's. The block passes
/// through shared memory, since a lane's elements are 32 apart and memory is read 16 bytes at a time.
TANDEM_KERNEL(most_threads)
norm_blocks_kernel(const bf16* gradient, std::int64_t count, double* partial, bool aligned) {
  static_assert(numerics::norm_lanes == warp_lanes);
  TANDEM_SHARED(bf16, staged, most_warps * layout_quantum);
  const int lane = thread_index() % warp_lanes, warp = thread_index() / warp_lanes;
  bf16* const own = staged + warp * layout_quantum;
  const std::int64_t blocks = ceil_div(count, layout_quantum);
  for (std::int64_t b = block_index() * most_warps + warp; b < blocks; b += grid_size() * most_warps) {
    const std::int64_t begin = b * layout_quantum;
    const std::int64_t length = count - begin < layout_quantum ? count - begin : layout_quantum;
    stage_block(own, gradient + begin, length, aligned, lane);
    warp_barrier();
    double sum = 0.0;
    for (int i = 0; i < layout_quantum / warp_lanes; ++i) {
      const double g = static_cast<double>(to_float(own[i * warp_lanes + lane]));
      // The square is exact, so that this rounds as a product and a sum would, in half the operations. Zeros behind the
      // end change no bit.
      sum = std::fma(g, g, sum);
    }
    for (int distance = warp_lanes / 2; distance > 0; distance /= 2) sum += shuffle_down(sum, distance);
    if (lane == 0) partial[b] = sum;
    warp_barrier();
  }
}

}  // namespace

void adamw(const AdamPiece& piece, const AdamCoefficients& c, CUstream_st* stream) {
  const bool all_aligned = aligned(piece.state.master, piece.state.m, piece.state.v, piece.gradient, piece.weight,
                                   piece.fp32_gradient, piece.fp32_weight);
  const bool all_wide = all_aligned && piece.count % (warp_lanes * packet) == 0;
  const auto start = [&](auto kernel) {
    launch("adamw", kernel, pointwise_geometry(piece.count), stream, piece, c, all_aligned);
  };
  switch (piece.format) {
    case StateFormat::fp32:
      return start(adamw_kernel<StateFormat::fp32>);
    case StateFormat::split:
      return start(adamw_kernel<StateFormat::split>);
    case StateFormat::bf16_moments:
      return start(adamw_kernel<StateFormat::bf16_moments>);
    case StateFormat::byte_moments:
      return start(all_wide ? adamw_coded_kernel<true> : adamw_coded_kernel<false>);
    case StateFormat::fp32_weights:
      return start(adamw_kernel<StateFormat::fp32_weights>);
    case StateFormat::lion:
      return start(lion_kernel<StateFormat::lion>);
    case StateFormat::lion_fp32_weights:
      return start(lion_kernel<StateFormat::lion_fp32_weights>);
  }
}

void weights_of_master(const float* master, bf16* weight, std::int64_t count, CUstream_st* stream) {
  launch("weights_of_master", weights_of_master_kernel, pointwise_geometry(count), stream, master, weight, count,
         aligned(master, weight));
}

void accumulate(float* sum, const bf16* gradient, bool first, std::int64_t count, CUstream_st* stream) {
  launch("accumulate", accumulate_kernel<bf16>, pointwise_geometry(count), stream, sum, gradient, first, count,
         aligned(sum, gradient));
}

void accumulate(float* sum, const float* gradient, bool first, std::int64_t count, CUstream_st* stream) {
  launch("accumulate", accumulate_kernel<float>, pointwise_geometry(count), stream, sum, gradient, first, count,
         aligned(sum, gradient));
}

void round(const float* sum, bf16* gradient, std::int64_t count, CUstream_st* stream) {
  launch("round", round_kernel, pointwise_geometry(count), stream, sum, gradient, count, aligned(sum, gradient));
}

void norm_blocks(const bf16* gradient, std::int64_t count, double* partial, CUstream_st* stream) {
  const Geometry geometry{blocks_for(ceil_div(count, layout_quantum), most_warps), most_threads};
  launch("norm_blocks", norm_blocks_kernel, geometry, stream, gradient, count, partial, aligned(gradient));
}

void norm_blocks(const float* gradient, std::int64_t count, double* partial, CUstream_st* stream) {
  const Geometry geometry{blocks_for(ceil_div(count, layout_quantum), most_warps), most_threads};
  launch("norm_blocks", fp32_norm_blocks_kernel, geometry, stream, gradient, count, partial);
}

}  // namespace tandem::gpu
