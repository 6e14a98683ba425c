#pragma once
// How kernels read and write elements: in packets of eight, 16 bytes at a time where the memory is aligned,
// one by one where it is not and at the end of an array. Arithmetic happens in fp32.
#include <kernel_language.hpp>

#include <cstdint>
#include <string>
#include <string_view>

#include "core/base/error.hpp"
#include "core/numerics/bf16.hpp"
#include "core/tensor/tensor.hpp"
#include "gpu_ops/base/geometry.hpp"

namespace tandem::gpu {

// -- on the host ---------------------------------------------------------------------------------------------------

/// Whether 16-byte accesses may be used at all of `addresses`.
template <class... Pointer>
bool aligned(const Pointer*... addresses) {
  return ((reinterpret_cast<std::uintptr_t>(addresses) % 16 == 0) && ...);
}

/// Whether every row of `channels` elements that begins at an aligned address ends at one.
template <class T>
bool whole_packets(std::int64_t channels) {
  return channels * static_cast<std::int64_t>(sizeof(T)) % 16 == 0;
}

/// Calls f with a value of the activation type: `f(float{})` or `f(bf16{})`.
template <class F>
void with_activation(DType dtype, const F& f) {
  if (dtype == DType::f32) return f(float{});
  if (dtype == DType::bf16) return f(bf16{});
  throw MisuseError("activations of a type that kernels do not take", name_of(dtype));
}

/// Typed pointer, or null for an empty view.
template <class T>
T* optional(const TensorView& view) {
  return view ? view.as<T>() : nullptr;
}

/// Items that a launch numbers in 32 bits, so that a Divisor takes the numbers apart. Throws MisuseError where there
/// are more: where an item is a packet, of arrays of 2^34 elements.
inline std::uint32_t numbered_items(const char* name, std::int64_t items) {
  if (items > INT32_MAX) throw MisuseError(name, "more items than a launch numbers: " + std::to_string(items));
  return static_cast<std::uint32_t>(items);
}
/// Divisor by an extent; where that is 0 there is nothing to divide.
inline Divisor divisor_by(std::int64_t extent) {
  return divisor_of(extent > 0 ? static_cast<std::uint32_t>(extent) : 1);
}

// -- on the device -------------------------------------------------------------------------------------------------

using numerics::from_float;
using numerics::to_float;

template <class T>
struct Packet {
  T x[packet];
};
using Floats = Packet<float>;

/// A packet as it lies in memory. Of bf16 it takes half the registers that its values take.
template <class T>
struct Raw {
  static constexpr int parts = packet * static_cast<int>(sizeof(T)) / static_cast<int>(sizeof(Words));
  Words part[parts];
};

TANDEM_DEVICE Floats widened(const Raw<float>& raw) {
  Floats p;
  for (int i = 0; i < packet; ++i) p.x[i] = numerics::bits_float(raw.part[i / 4].word[i % 4]);
  return p;
}

TANDEM_DEVICE Floats widened(const Raw<bf16>& raw) {
  Floats p;
  for (int i = 0; i < packet / 2; ++i) {
    p.x[2 * i] = numerics::bits_float(raw.part[0].word[i] << 16);
    p.x[2 * i + 1] = numerics::bits_float(raw.part[0].word[i] & 0xffff0000u);
  }
  return p;
}

TANDEM_DEVICE Raw<float> packed(const Floats& p) {
  Raw<float> raw;
  for (int i = 0; i < packet; ++i) raw.part[i / 4].word[i % 4] = numerics::float_bits(p.x[i]);
  return raw;
}

TANDEM_DEVICE Raw<bf16> packed(const Packet<bf16>& p) {
  Raw<bf16> raw;
  for (int i = 0; i < packet / 2; ++i) {
    raw.part[0].word[i] =
        static_cast<std::uint32_t>(p.x[2 * i].bits) | (static_cast<std::uint32_t>(p.x[2 * i + 1].bits) << 16);
  }
  return raw;
}

/// Loads and stores at multiples of 16 bytes.
template <class T>
TANDEM_DEVICE Raw<T> wide_load_raw(const T* from) {
  Raw<T> raw;
  for (int i = 0; i < Raw<T>::parts; ++i) raw.part[i] = load_words(from + i * (packet / Raw<T>::parts));
  return raw;
}
template <class T>
TANDEM_DEVICE Floats wide_load(const T* from) {
  return widened(wide_load_raw(from));
}
template <class T>
TANDEM_DEVICE void wide_store(T* to, const Packet<T>& p) {
  const Raw<T> raw = packed(p);
  for (int i = 0; i < Raw<T>::parts; ++i) store_words(to + i * (packet / Raw<T>::parts), raw.part[i]);
}

/// The part of an array that a thread handles at once: `count` elements from `at` on.
struct Span {
  std::int64_t at;
  int count;
  bool wide;  ///< a whole packet at an aligned address
};

/// Elements from `at` on, up to `end`.
TANDEM_DEVICE Span span_at(std::int64_t at, std::int64_t end, bool aligned) {
  const int count = end - at < packet ? static_cast<int>(end - at) : packet;
  return {at, count, aligned && count == packet};
}

/// The elements of a span as they are; zeros behind its end.
template <class T>
TANDEM_DEVICE Raw<T> load_raw(const T* data, const Span& span) {
  if (span.wide) return wide_load_raw(data + span.at);
  Packet<T> p = {};
  for (int i = 0; i < packet; ++i) {
    if (i < span.count) p.x[i] = data[span.at + i];
  }
  return packed(p);
}

/// The weights of a norm with what is added to them.
TANDEM_DEVICE Floats widened_plus(const Raw<bf16>& weights, float offset) {
  Floats p = widened(weights);
  for (int i = 0; i < packet; ++i) p.x[i] = p.x[i] + offset;
  return p;
}

/// The elements of a span as fp32; zeros behind its end.
template <class T>
TANDEM_DEVICE Floats load(const T* data, const Span& span) {
  return widened(load_raw(data, span));
}

/// Elements of bf16 as they lie in memory.
TANDEM_DEVICE void store_raw(bf16* data, const Span& span, const Raw<bf16>& raw) {
  if (span.wide) return store_words(data + span.at, raw.part[0]);
  for (int i = 0; i < packet; ++i) {
    const std::uint32_t word = raw.part[0].word[i / 2] >> (i % 2 * 16);
    if (i < span.count) data[span.at + i] = bf16{static_cast<std::uint16_t>(word)};
  }
}

template <class T>
TANDEM_DEVICE void store_exactly(T* data, const Span& span, const Packet<T>& p) {
  if (span.wide) return wide_store(data + span.at, p);
  for (int i = 0; i < packet; ++i) {
    if (i < span.count) data[span.at + i] = p.x[i];
  }
}

/// Whether none is a NaN: one comparison tells of two.
TANDEM_DEVICE bool all_numbers(const Floats& p) {
  bool numbers = true;
  for (int i = 0; i < packet; i += 2) numbers &= p.x[i] < p.x[i + 1] || p.x[i] >= p.x[i + 1];
  return numbers;
}

/// Rounded to nearest even. The hardware rounds two at once, but makes every NaN the same one, which the CPU does not:
/// a packet that has any is rounded one by one.
TANDEM_DEVICE Raw<bf16> rounded(const Floats& p) {
  if (!all_numbers(p)) {
    Packet<bf16> each;
    for (int i = 0; i < packet; ++i) each.x[i] = from_float<bf16>(p.x[i]);
    return packed(each);
  }
  Raw<bf16> raw;
  for (int i = 0; i < packet / 2; ++i) raw.part[0].word[i] = bf16_pair(p.x[2 * i], p.x[2 * i + 1]);
  return raw;
}

/// Stores as T, rounded to nearest even where that is bf16.
TANDEM_DEVICE void store(float* data, const Span& span, const Floats& p) { store_exactly(data, span, p); }
TANDEM_DEVICE void store(bf16* data, const Span& span, const Floats& p) { store_raw(data, span, rounded(p)); }

/// Calls body(span) for all of [0, count), each span once, by strides of the grid.
template <class Body>
TANDEM_DEVICE void for_spans(std::int64_t count, bool aligned, const Body& body) {
  const std::int64_t stride = grid_size() * block_size() * packet;
  for (std::int64_t at = (block_index() * block_size() + thread_index()) * packet; at < count; at += stride) {
    body(span_at(at, count, aligned));
  }
}

/// Calls body(i) for each of [0, items), by strides of the grid.
template <class Body>
TANDEM_DEVICE void for_items(std::uint32_t items, const Body& body) {
  const auto stride = static_cast<std::uint32_t>(grid_size() * block_size());
  const auto first = static_cast<std::uint32_t>(block_index() * block_size() + thread_index());
  for (std::uint32_t i = first; i < items; i += stride) body(i);
}

/// body(span), compiled twice: where a span is wide, none of its accesses asks.
template <class Body>
TANDEM_DEVICE void with_span(const Span& span, const Body& body) {
  if (span.wide) {
    body(Span{span.at, packet, true});
  } else {
    body(Span{span.at, span.count, false});
  }
}

/// Lane of this thread in its warp.
TANDEM_DEVICE int own_lane() { return thread_index() % warp_lanes; }

/// Calls body(span) for all of [0, count) like for_spans, but with all lanes of a warp together: spans of some may have
/// no elements.
template <class Body>
TANDEM_DEVICE void for_warp_spans(std::int64_t count, bool aligned, const Body& body) {
  const std::int64_t stride = grid_size() * block_size() * packet;
  const std::int64_t lane_at = own_lane() * packet;
  for (std::int64_t at = (block_index() * block_size() + thread_index()) * packet; at - lane_at < count; at += stride) {
    body(span_at(at, count, aligned));
  }
}

/// Calls body(span) for a row of `count` elements, shared by the threads of the block.
template <class Body>
TANDEM_DEVICE void for_row_spans(std::int64_t count, bool aligned, const Body& body) {
  for (std::int64_t at = static_cast<std::int64_t>(thread_index()) * packet; at < count; at += block_size() * packet) {
    body(span_at(at, count, aligned));
  }
}

}  // namespace tandem::gpu
