#pragma once
// How kernels read and write elements: in packets of eight, 16 bytes at a time where the memory is aligned,
// one by one where it is not and at the end of an array. Arithmetic happens in fp32.
#include <kernel_language.hpp>

#include <cstdint>
#include <string_view>

#include "core/error.hpp"
#include "core/numerics/bf16.hpp"
#include "core/tensor.hpp"
#include "gpu_ops/geometry.hpp"

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

// -- on the device -------------------------------------------------------------------------------------------------

TANDEM_DEVICE float to_float(float x) { return x; }
TANDEM_DEVICE float to_float(bf16 x) { return numerics::bf16_to_float(x); }

/// Rounds to nearest even where T is bf16.
template <class T>
TANDEM_DEVICE T from_float(float x);
template <>
TANDEM_DEVICE float from_float<float>(float x) {
  return x;
}
template <>
TANDEM_DEVICE bf16 from_float<bf16>(float x) {
  return numerics::round_to_bf16(x);
}

template <class T>
struct Packet {
  T x[packet];
};
using Floats = Packet<float>;

TANDEM_DEVICE Floats wide_load(const float* from) {
  const Words low = load_words(from), high = load_words(from + 4);
  Floats p;
  for (int i = 0; i < 4; ++i) {
    p.x[i] = numerics::bits_float(low.word[i]);
    p.x[i + 4] = numerics::bits_float(high.word[i]);
  }
  return p;
}

TANDEM_DEVICE Floats wide_load(const bf16* from) {
  const Words words = load_words(from);
  Floats p;
  for (int i = 0; i < 4; ++i) {
    p.x[2 * i] = numerics::bits_float(words.word[i] << 16);
    p.x[2 * i + 1] = numerics::bits_float(words.word[i] & 0xffff0000u);
  }
  return p;
}

TANDEM_DEVICE void wide_store(float* to, const Floats& p) {
  Words low, high;
  for (int i = 0; i < 4; ++i) {
    low.word[i] = numerics::float_bits(p.x[i]);
    high.word[i] = numerics::float_bits(p.x[i + 4]);
  }
  store_words(to, low);
  store_words(to + 4, high);
}

TANDEM_DEVICE void wide_store(bf16* to, const Packet<bf16>& p) {
  Words words;
  for (int i = 0; i < 4; ++i) {
    words.word[i] =
        static_cast<std::uint32_t>(p.x[2 * i].bits) | (static_cast<std::uint32_t>(p.x[2 * i + 1].bits) << 16);
  }
  store_words(to, words);
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

/// The elements of a span as fp32; zeros behind its end.
template <class T>
TANDEM_DEVICE Floats load(const T* data, const Span& span) {
  if (span.wide) return wide_load(data + span.at);
  Floats p;
  for (int i = 0; i < packet; ++i) p.x[i] = i < span.count ? to_float(data[span.at + i]) : 0.0F;
  return p;
}

template <class T>
TANDEM_DEVICE void store_exactly(T* data, const Span& span, const Packet<T>& p) {
  if (span.wide) return wide_store(data + span.at, p);
  for (int i = 0; i < packet; ++i) {
    if (i < span.count) data[span.at + i] = p.x[i];
  }
}

/// Stores as T, rounded to nearest even where that is bf16.
template <class T>
TANDEM_DEVICE void store(T* data, const Span& span, const Floats& p) {
  Packet<T> rounded;
  for (int i = 0; i < packet; ++i) rounded.x[i] = from_float<T>(p.x[i]);
  store_exactly(data, span, rounded);
}

/// Calls body(span) for all of [0, count), each span once, by strides of the grid.
template <class Body>
TANDEM_DEVICE void for_spans(std::int64_t count, bool aligned, const Body& body) {
  const std::int64_t stride = grid_size() * block_size() * packet;
  for (std::int64_t at = (block_index() * block_size() + thread_index()) * packet; at < count; at += stride) {
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
