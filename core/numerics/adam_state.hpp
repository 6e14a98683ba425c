#pragma once
// How master and moments are stored, and the format's optimizer, AdamW or Lion, on an element of stored state. Scalar
// kernel, SIMD tails and CUDA kernel call the same text.
#include <array>
#include <cstddef>
#include <cstdint>

#include "core/numerics/adam.hpp"
#include "core/numerics/bf16.hpp"
#include "core/numerics/lion.hpp"
#include "core/numerics/moment_codes.hpp"
#include "core/numerics/optimizer.hpp"
#include "core/numerics/random.hpp"

namespace tandem {

/// `fp32`: three fp32 arrays. `split`: the master is the bf16 weight and a 16-bit residual (`join_master`),
/// lossless. `bf16_moments`: `split`, and moments in bf16, rounded stochastically. `byte_moments`: `split`, and moments
/// in a byte each (core/numerics/moment_codes.hpp), rounded likewise. `fp32_weights`: of parameters whose weights are
/// kept in fp32, beside any of the others: the weight is the master, moments and gradients are fp32. `lion`: state of
/// another optimizer, the master as in `split` and one moment in fp32; `lion_fp32_weights` is to it as `fp32_weights`
/// is to the others.
enum class StateFormat : std::uint8_t {
  fp32,
  split,
  bf16_moments,
  byte_moments,
  fp32_weights,
  lion,
  lion_fp32_weights
};

/// Formats of AdamW that are chosen for parameters whose weights are bf16: the same optimizer, in more or fewer bytes.
inline constexpr std::array adamw_formats = {StateFormat::fp32, StateFormat::split, StateFormat::bf16_moments,
                                             StateFormat::byte_moments};
/// All formats that are chosen for such parameters.
inline constexpr std::array state_formats = {StateFormat::fp32, StateFormat::split, StateFormat::bf16_moments,
                                             StateFormat::byte_moments, StateFormat::lion};

constexpr bool is_lion(StateFormat f) noexcept { return f == StateFormat::lion || f == StateFormat::lion_fp32_weights; }
constexpr Optimizer optimizer_of(StateFormat f) noexcept { return is_lion(f) ? Optimizer::lion : Optimizer::adamw; }

/// Whether the weight itself is the master, in fp32.
constexpr bool has_fp32_weights(StateFormat f) noexcept {
  return f == StateFormat::fp32_weights || f == StateFormat::lion_fp32_weights;
}
/// The format of fp32 weights beside those in format `f`.
constexpr StateFormat with_fp32_weights(StateFormat f) noexcept {
  return is_lion(f) ? StateFormat::lion_fp32_weights : StateFormat::fp32_weights;
}

/// Whether a moment is rounded to what the format holds, and its bits therefore are the format's own.
constexpr bool rounds_moments(StateFormat f) noexcept {
  return f == StateFormat::bf16_moments || f == StateFormat::byte_moments;
}

/// A format as a type, and the way from the value to it.
template <StateFormat format>
struct Format {};
template <class Body>
void with_format(StateFormat format, const Body& body) {
  switch (format) {
    case StateFormat::fp32:
      return body(Format<StateFormat::fp32>());
    case StateFormat::split:
      return body(Format<StateFormat::split>());
    case StateFormat::bf16_moments:
      return body(Format<StateFormat::bf16_moments>());
    case StateFormat::byte_moments:
      return body(Format<StateFormat::byte_moments>());
    case StateFormat::fp32_weights:
      return body(Format<StateFormat::fp32_weights>());
    case StateFormat::lion:
      return body(Format<StateFormat::lion>());
    case StateFormat::lion_fp32_weights:
      return body(Format<StateFormat::lion_fp32_weights>());
  }
}

/// Bytes of `count` elements of each array; of `byte_moments` those of whole records, which also makes them the
/// distance to element `count`, a multiple of `coded_record`.
constexpr std::size_t master_bytes(StateFormat f, std::int64_t count) noexcept {
  if (has_fp32_weights(f)) return 0;
  return static_cast<std::size_t>(count) * (f == StateFormat::fp32 ? 4 : 2);
}
constexpr std::size_t m_bytes(StateFormat f, std::int64_t count) noexcept {
  if (f == StateFormat::byte_moments) return coded_bytes(count);
  return static_cast<std::size_t>(count) * (f == StateFormat::bf16_moments ? 2 : 4);
}
constexpr std::size_t v_bytes(StateFormat f, std::int64_t count) noexcept { return is_lion(f) ? 0 : m_bytes(f, count); }
constexpr std::size_t state_bytes(StateFormat f, std::int64_t count) noexcept {
  return master_bytes(f, count) + m_bytes(f, count) + v_bytes(f, count);
}

/// Bytes of `count` weights, and of their final gradients.
constexpr std::size_t weight_bytes(StateFormat f, std::int64_t count) noexcept {
  return static_cast<std::size_t>(count) * (has_fp32_weights(f) ? 4 : 2);
}
constexpr std::size_t gradient_bytes(StateFormat f, std::int64_t count) noexcept { return weight_bytes(f, count); }
/// Whether an update reads the weights, as they are the master or half of it.
constexpr bool reads_weights(StateFormat f) noexcept { return f != StateFormat::fp32; }

/// Bytes of memory that an update of `count` elements moves: state read and written, the gradient read, the weight
/// written, and read too where it is half of the master.
constexpr std::size_t update_bytes(StateFormat f, std::int64_t count) noexcept {
  return 2 * state_bytes(f, count) + gradient_bytes(f, count) + weight_bytes(f, count) * (reads_weights(f) ? 2 : 1);
}

/// Average state bytes of one element among many: 12, 10, 6, 4 and a 32nd, of Lion 6; of an update 28, 26, 18, 14 and a
/// 16th, of Lion 18.
constexpr double state_bytes_each(StateFormat f) noexcept {
  return static_cast<double>(state_bytes(f, coded_record)) / coded_record;
}
constexpr double update_bytes_each(StateFormat f) noexcept {
  return static_cast<double>(update_bytes(f, coded_record)) / coded_record;
}

/// Three arrays of a contiguous range of state, of the types that the format says. Not owned.
struct StateArrays {
  void* master = nullptr;  ///< fp32: float; of fp32 weights none; else std::uint16_t, the residual beside the weight
  void* m = nullptr;       ///< float; bf16_moments: bf16; byte_moments: records
  void* v = nullptr;       ///< has m's type; none for Lion

  /// The arrays from element `n` on; of byte_moments a multiple of `coded_record`.
  StateArrays from(std::int64_t n, StateFormat f) const noexcept {
    const auto at = [](void* array, std::size_t bytes) {
      return static_cast<void*>(static_cast<std::byte*>(array) + bytes);
    };
    return {at(master, master_bytes(f, n)), at(m, m_bytes(f, n)), at(v, v_bytes(f, n))};
  }
};

/// One contiguous piece of one parameter's state, (count) each. Arrays do not overlap. Of byte_moments it begins with a
/// record.
struct AdamPiece {
  StateArrays state;               ///< read and written
  const bf16* gradient = nullptr;  ///< read
  bf16* weight = nullptr;          ///< written: master rounded ties away from zero; read too unless fp32
  std::int64_t count = 0;
  StateFormat format = StateFormat::fp32;
  std::uint64_t index = 0;  ///< index of the first element among all state, the key of stochastic rounding
  // Gradient and weight in place of those above where weights are fp32:
  const float* fp32_gradient = nullptr;  ///< read
  float* fp32_weight = nullptr;          ///< the master, read and written

  AdamPiece from(std::int64_t n) const noexcept {
    AdamPiece rest{state.from(n, format), gradient,   weight, count - n, format, index + static_cast<std::uint64_t>(n),
                   fp32_gradient,         fp32_weight};
    if (has_fp32_weights(format)) {
      rest.fp32_gradient += n;
      rest.fp32_weight += n;
    } else {
      rest.gradient += n;
      rest.weight += n;
    }
    return rest;
  }
};

namespace numerics {

/// Round to bf16 up or down, up with the probability of the part cut off: `bits` are 16 random ones. Unbiased,
/// so that a moment keeps moving where each step's change is below half a unit. Infinity and NaN as
/// `round_to_bf16`.
TANDEM_HD bf16 round_stochastically(float x, std::uint32_t bits) {
  const std::uint32_t all = float_bits(x);
  if ((all & 0x7f800000u) == 0x7f800000u) return round_to_bf16(x);
  return bf16{static_cast<std::uint16_t>((all + bits) >> 16)};
}

/// Elements that a block of random bits serves.
constexpr std::uint64_t elements_per_block = 4;

/// The block of random bits `index` of a step. Of few rounds: rounding needs bits without bias or pattern, and draws so
/// many of them that they, not memory, would set the pace of the update.
TANDEM_HD Philox128 moment_block(std::uint64_t seed, std::uint64_t step, std::uint64_t index) {
  return philox_block<philox_fewest_rounds>(seed, step, index);
}

/// 32 random bits of one element in one step: the upper half for v, the lower for m.
TANDEM_HD std::uint32_t moment_bits(std::uint64_t seed, std::uint64_t step, std::uint64_t index) {
  return moment_block(seed, step, index / elements_per_block).word[index % elements_per_block];
}

/// Elements of byte_moments that a block of random bits serves.
constexpr std::uint64_t coded_elements_per_block = 8;

/// Random bits of coded moments: each half of a random word serves one element, its m and its v. v has the bits of m
/// with their bytes exchanged: the upper byte nearly decides, so both roundings are nearly independent with half the
/// draws.
TANDEM_HD std::uint32_t half_of_word(std::uint32_t word, int half) { return half == 0 ? word & 0xffffu : word >> 16; }
TANDEM_HD std::uint32_t increment_of_m(std::uint32_t half) { return random_increment(half); }
TANDEM_HD std::uint32_t increment_of_v(std::uint32_t half) {
  return random_increment((half >> 8 | half << 8) & 0xffffu);
}

template <StateFormat format>
TANDEM_HD float load_master(const AdamPiece& p, std::int64_t i) {
  if constexpr (format == StateFormat::fp32) return static_cast<const float*>(p.state.master)[i];
  if constexpr (has_fp32_weights(format)) return p.fp32_weight[i];
  return join_master(p.weight[i], static_cast<const std::uint16_t*>(p.state.master)[i]);
}
template <StateFormat format>
TANDEM_HD float load_gradient(const AdamPiece& p, std::int64_t i) {
  if constexpr (has_fp32_weights(format)) return p.fp32_gradient[i];
  return bf16_to_float(p.gradient[i]);
}
/// Stores a master, and the weight that is its rounding.
template <StateFormat format>
TANDEM_HD void store_master(const AdamPiece& p, std::int64_t i, float master) {
  if constexpr (has_fp32_weights(format)) {
    p.fp32_weight[i] = master;
  } else {
    p.weight[i] = weight_of_master(master);
    if constexpr (format == StateFormat::fp32) {
      static_cast<float*>(p.state.master)[i] = master;
    } else {
      static_cast<std::uint16_t*>(p.state.master)[i] = master_residual(master);
    }
  }
}

/// Lion on element `i` of a piece.
template <StateFormat format>
TANDEM_HD void lion_element(const AdamPiece& p, std::int64_t i, const AdamCoefficients& c) {
  float& m = static_cast<float*>(p.state.m)[i];
  const LionElement next = lion({load_master<format>(p, i), m}, load_gradient<format>(p, i), c);
  store_master<format>(p, i, next.master);
  m = next.m;
}

/// AdamW on element `i` of a piece.
template <StateFormat format>
TANDEM_HD void adamw_element(const AdamPiece& p, std::int64_t i, const AdamCoefficients& c) {
  AdamElement s{load_master<format>(p, i), 0.0F, 0.0F};
  if constexpr (format == StateFormat::bf16_moments) {
    s.m = bf16_to_float(static_cast<const bf16*>(p.state.m)[i]);
    s.v = bf16_to_float(static_cast<const bf16*>(p.state.v)[i]);
  } else {
    s.m = static_cast<const float*>(p.state.m)[i];
    s.v = static_cast<const float*>(p.state.v)[i];
  }
  s = adamw(s, load_gradient<format>(p, i), c);
  store_master<format>(p, i, s.master);
  if constexpr (format == StateFormat::bf16_moments) {
    const std::uint32_t random = moment_bits(c.seed, c.step, p.index + static_cast<std::uint64_t>(i));
    static_cast<bf16*>(p.state.m)[i] = round_stochastically(s.m, random & 0xffffu);
    static_cast<bf16*>(p.state.v)[i] = round_stochastically(s.v, random >> 16);
  } else {
    static_cast<float*>(p.state.m)[i] = s.m;
    static_cast<float*>(p.state.v)[i] = s.v;
  }
}

/// AdamW on `count` elements of byte_moments from `first` on, which begins a block that they do not leave.
TANDEM_HD void adamw_block(const AdamPiece& p, std::int64_t first, std::int64_t count, const AdamCoefficients& c) {
  const CodedBlock of_m = coded_block_at(p.state.m, first), of_v = coded_block_at(p.state.v, first);
  float m[coded_block], v[coded_block];
  std::uint32_t largest_m = 0, largest_v = 0;
  const auto larger = [](std::uint32_t a, float x) {
    const std::uint32_t magnitude = float_bits(x) & 0x7fffffffu;
    return a < magnitude ? magnitude : a;
  };
  for (std::int64_t i = 0; i < count; ++i) {
    const AdamElement s = adamw({load_master<StateFormat::byte_moments>(p, first + i),
                                 decode_m(of_m.codes[i], *of_m.exponent), decode_v(of_v.codes[i], *of_v.exponent)},
                                bf16_to_float(p.gradient[first + i]), c);
    store_master<StateFormat::byte_moments>(p, first + i, s.master);
    m[i] = s.m;
    v[i] = s.v;
    largest_m = larger(largest_m, s.m);
    largest_v = larger(largest_v, s.v);
  }
  const std::uint32_t m_scale = m_exponent(largest_m), v_scale = v_exponent(largest_v);
  constexpr auto each = static_cast<std::int64_t>(coded_elements_per_block);
  const std::uint64_t random_block = (p.index + static_cast<std::uint64_t>(first)) / coded_elements_per_block;
  for (std::int64_t i = 0; i < count; ++i) {
    const Philox128 random = moment_block(c.seed, c.step, random_block + static_cast<std::uint64_t>(i / each));
    const std::uint32_t half = half_of_word(random.word[i % each / 2], static_cast<int>(i % 2));
    of_m.codes[i] = encode_m(m[i], m_scale, increment_of_m(half));
    of_v.codes[i] = encode_v(v[i], v_scale, increment_of_v(half));
  }
  *of_m.exponent = static_cast<std::uint8_t>(m_scale);
  *of_v.exponent = static_cast<std::uint8_t>(v_scale);
}

/// The format's optimizer on elements [begin, end) of a piece; of byte_moments `begin` begins a block.
template <StateFormat format>
TANDEM_HD void update_range(const AdamPiece& p, std::int64_t begin, std::int64_t end, const AdamCoefficients& c) {
  if constexpr (format == StateFormat::byte_moments) {
    for (std::int64_t i = begin; i < end; i += coded_block) {
      adamw_block(p, i, end - i < coded_block ? end - i : coded_block, c);
    }
  } else if constexpr (is_lion(format)) {
    for (std::int64_t i = begin; i < end; ++i) lion_element<format>(p, i, c);
  } else {
    for (std::int64_t i = begin; i < end; ++i) adamw_element<format>(p, i, c);
  }
}

}  // namespace numerics
}  // namespace tandem
