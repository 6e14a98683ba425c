#pragma once
// The vocabulary of kernels, compiled as C++. Its twin is cuda/kernel_language.hpp; both provide the same
// names, described there.
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "core/numerics/bf16.hpp"
#include "gpu_ops/base/geometry.hpp"
#include "gpu_ops/emulation/grid.hpp"

#define TANDEM_KERNEL_BY(threads, blocks) void
#define TANDEM_KERNEL(threads) TANDEM_KERNEL_BY(threads, 1)
#define TANDEM_DEVICE inline
#define TANDEM_UNROLL
#define TANDEM_UNROLL_BY(n)
#define TANDEM_SHARED(type, name, count) \
  type* const name = static_cast<type*>(::tandem::emulation::shared_array(sizeof(type) * (count)))
#define TANDEM_DYNAMIC_SHARED(type, name) type* const name = static_cast<type*>(::tandem::emulation::dynamic_shared())

namespace tandem::gpu {

inline int thread_index() { return emulation::position().thread; }
inline int block_size() { return emulation::position().block_size; }
inline std::int64_t block_index() { return emulation::position().block; }
inline std::int64_t grid_size() { return emulation::position().grid; }

inline void barrier() { emulation::barrier(); }
inline void warp_barrier() { emulation::warp_barrier(); }

namespace detail {

template <class T>
T from_lane(T value, int lane) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(std::uint64_t));
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  const std::uint64_t* const lanes = emulation::exchange(bits);
  T result;
  std::memcpy(&result, lanes + lane, sizeof(T));
  return result;
}

inline int own_lane() { return thread_index() % warp_lanes; }

}  // namespace detail

template <class T>
T shuffle_xor(T value, int distance) {
  return detail::from_lane(value, detail::own_lane() ^ distance);
}
template <class T>
T shuffle_down(T value, int distance) {
  const int from = detail::own_lane() + distance;
  return detail::from_lane(value, from < warp_lanes ? from : detail::own_lane());
}
template <class T>
T value_of_lane(T value, int lane) {
  return detail::from_lane(value, lane);
}
inline std::uint32_t ballot(bool value) {
  const std::uint64_t* const lanes = emulation::exchange(value ? 1 : 0);
  std::uint32_t bits = 0;
  for (int lane = 0; lane < warp_lanes; ++lane) bits |= static_cast<std::uint32_t>(lanes[lane]) << lane;
  return bits;
}

inline int set_bits(std::uint32_t word) { return std::popcount(word); }
inline int lowest_bit(std::uint32_t word) { return std::countr_zero(word); }

inline float exp2_estimate(float x) {
  const float y = std::exp2(x);
  return y < std::numeric_limits<float>::min() ? 0.0F : y;
}
inline std::uint32_t bf16_pair(float low, float high) {
  constexpr std::uint32_t the_nan = 0x7fff;
  const auto rounded = [](float x) { return std::isnan(x) ? the_nan : std::uint32_t{numerics::round_to_bf16(x).bits}; };
  return rounded(low) | rounded(high) << 16;
}

struct Words {
  std::uint32_t word[4];
};
inline Words load_words(const void* from) {
  emulation::require_aligned(from);
  Words w{};
  std::memcpy(&w, from, sizeof w);
  return w;
}
inline void store_words(void* to, const Words& w) {
  emulation::require_aligned(to);
  std::memcpy(to, &w, sizeof w);
}

inline void start_copy(void* to, const void* from) {
  emulation::require_aligned(from);
  emulation::require_aligned(to);
  emulation::start_copy(to, from, sizeof(Words));
}
inline void start_copy_or_zeros(void* to, const void* from, bool copies) {
  alignas(16) static constexpr Words zeros{};
  start_copy(to, copies ? from : &zeros);
}
inline void start_word_copy(void* to, const void* from) {
  emulation::require_aligned(from, sizeof(std::uint32_t));
  emulation::require_aligned(to, sizeof(std::uint32_t));
  emulation::start_copy(to, from, sizeof(std::uint32_t));
}
inline void close_copies() { emulation::close_copies(); }
template <int left>
void await_copies() {
  emulation::await_copies(left);
}

inline void store_word(void* to, std::uint32_t word) {
  emulation::require_aligned(to, sizeof word);
  std::memcpy(to, &word, sizeof word);
}

struct TwoWords {
  std::uint32_t word[2];
};
inline TwoWords load_two_words(const void* from) {
  emulation::require_aligned(from, sizeof(TwoWords));
  TwoWords w{};
  std::memcpy(&w, from, sizeof w);
  return w;
}
inline void store_two_words(void* to, const TwoWords& w) {
  emulation::require_aligned(to, sizeof w);
  std::memcpy(to, &w, sizeof w);
}

namespace detail {

/// The lane's two elements of each of the four matrices whose rows the lanes name.
template <class At>
Words matrix_words(const bf16* row, const At& at) {
  emulation::require_aligned(row);
  emulation::see_read(row, sizeof(Words));  // by the lane that names it, whoever gets which elements
  const std::uint64_t* const rows = emulation::exchange(reinterpret_cast<std::uintptr_t>(row));
  Words w{};
  for (int matrix = 0; matrix < 4; ++matrix) {
    for (int i = 0; i < 2; ++i) {
      const auto [r, c] = at(own_lane() / 4, own_lane() % 4 * 2 + i);
      const auto* const from = std::bit_cast<const bf16*>(static_cast<std::uintptr_t>(rows[matrix * 8 + r]));
      w.word[matrix] |= static_cast<std::uint32_t>(from[c].bits) << (16 * i);
    }
  }
  return w;
}

/// Element i of the two in a word.
inline float half_of(std::uint64_t word, int i) {
  return numerics::bits_float(static_cast<std::uint32_t>(word >> (16 * i)) << 16);
}

}  // namespace detail

inline Words load_matrices(const bf16* row) {
  return detail::matrix_words(row, [](int r, int c) { return std::pair(r, c); });
}
inline Words load_transposed(const bf16* row) {
  return detail::matrix_words(row, [](int r, int c) { return std::pair(c, r); });
}

struct ProductPart {
  float x[4];
};
inline void multiply_add(ProductPart& c, const Words& a, std::uint32_t b0, std::uint32_t b1) {
  const auto both = [](std::uint32_t low, std::uint32_t high) { return low | static_cast<std::uint64_t>(high) << 32; };
  float left[2][16], right[2][16];  // this lane's rows of a and columns of b
  const int row = detail::own_lane() / 4, column = detail::own_lane() % 4 * 2;
  for (int columns = 0; columns < 2; ++columns) {
    const std::uint64_t* const lanes = emulation::exchange(both(a.word[2 * columns], a.word[2 * columns + 1]));
    for (int k = 0; k < 8; ++k) {
      const std::uint64_t words = lanes[row * 4 + k / 2];
      for (int half = 0; half < 2; ++half) left[half][8 * columns + k] = detail::half_of(words >> (32 * half), k % 2);
    }
  }
  const std::uint64_t* const lanes = emulation::exchange(both(b0, b1));
  for (int k = 0; k < 16; ++k) {
    for (int i = 0; i < 2; ++i) {
      right[i][k] = detail::half_of(lanes[(column + i) * 4 + k % 8 / 2] >> (32 * (k / 8)), k % 2);
    }
  }
  for (int e = 0; e < 4; ++e) {
    for (int k = 0; k < 16; ++k) c.x[e] = numerics::fma(left[e / 2][k], right[e % 2][k], c.x[e]);
  }
}

/// Shows the emulation an argument's bytes. Padding between members is not part of the value: where the compiler cannot
/// clear it, only plain addresses are shown.
template <class T>
void show_argument(const char* name, T& argument) {
  if constexpr (requires { __builtin_clear_padding(&argument); }) {
    __builtin_clear_padding(&argument);
    emulation::see_argument(name, &argument, sizeof argument);
  } else if constexpr (std::is_pointer_v<T>) {
    emulation::see_argument(name, &argument, sizeof argument);  // NOLINT(bugprone-sizeof-expression): the pointer
  }
}

template <class... P>
void start_kernel(const char* name, void (*kernel)(P...), const Geometry& geometry, CUstream_st* stream,
                  P... arguments) {
  (show_argument(name, arguments), ...);
  emulation::enqueue(name, stream, [=] { emulation::run_grid(name, geometry, [&] { kernel(arguments...); }); });
}

}  // namespace tandem::gpu
