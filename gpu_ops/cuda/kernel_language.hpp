#pragma once
// The vocabulary of kernels, compiled by nvcc. Its twin is emulation/kernel_language.hpp; both provide the
// same names.
#include <cuda_runtime.h>

#include <array>
#include <cstdint>

#include "core/numerics/bf16.hpp"
#include "gpu_ops/base/geometry.hpp"
#include "gpu_ops/device/runtime.hpp"

/// Attribute of a kernel: the most threads of its blocks, and how many of these a multiprocessor's registers have to
/// hold.
#define TANDEM_KERNEL_BY(threads, blocks) __global__ void __launch_bounds__(threads, blocks)
#define TANDEM_KERNEL(threads) TANDEM_KERNEL_BY(threads, 1)
#define TANDEM_DEVICE __device__ __forceinline__
/// Attribute of a loop whose arrays must stay in registers.
#define TANDEM_UNROLL _Pragma("unroll")
/// Attribute of a loop of which `n` rounds become one.
#define TANDEM_PRAGMA(text) _Pragma(#text)
#define TANDEM_UNROLL_BY(n) TANDEM_PRAGMA(unroll n)
/// An array of `count` elements shared by the block, aligned to 16 bytes; uninitialised.
#define TANDEM_SHARED(type, name, count) __shared__ __align__(16) type name[count]
/// The dynamic shared memory of the launch, aligned to 16 bytes; uninitialised.
#define TANDEM_DYNAMIC_SHARED(type, name)                         \
  extern __shared__ __align__(16) unsigned char tandem_dynamic[]; \
  type* const name = reinterpret_cast<type*>(tandem_dynamic)

namespace tandem::gpu {

TANDEM_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
TANDEM_DEVICE int block_size() { return static_cast<int>(blockDim.x); }
TANDEM_DEVICE std::int64_t block_index() { return static_cast<std::int64_t>(blockIdx.x); }
TANDEM_DEVICE std::int64_t grid_size() { return static_cast<std::int64_t>(gridDim.x); }

/// Every thread of the block arrives before one goes on; shared and global writes before it are seen after it.
TANDEM_DEVICE void barrier() { __syncthreads(); }
/// Barrier among the lanes of a warp.
TANDEM_DEVICE void warp_barrier() { __syncwarp(); }

/// The value of lane `lane ^ distance`. All lanes of the warp take part.
template <class T>
TANDEM_DEVICE T shuffle_xor(T value, int distance) {
  return __shfl_xor_sync(0xffffffffu, value, distance);
}
/// The value of lane `lane + distance`; the last lanes keep their own. All lanes of the warp take part.
template <class T>
TANDEM_DEVICE T shuffle_down(T value, int distance) {
  return __shfl_down_sync(0xffffffffu, value, static_cast<unsigned>(distance));
}
/// The value of `lane`. All lanes of the warp take part.
template <class T>
TANDEM_DEVICE T value_of_lane(T value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}
/// Bit i is what lane i says. All lanes of the warp take part.
TANDEM_DEVICE std::uint32_t ballot(bool value) { return __ballot_sync(0xffffffffu, value); }
/// Bit operations on a word: the number of set bits, and the place of the lowest one (in a word that has any).
TANDEM_DEVICE int set_bits(std::uint32_t word) { return __popc(word); }
TANDEM_DEVICE int lowest_bit(std::uint32_t word) { return __ffs(static_cast<int>(word)) - 1; }

/// 2^x to within two units in the last place, and zero where that lies below the smallest normal number (PTX ISA,
/// ex2.approx.ftz.f32): of -inf zero, of NaN a NaN. Emulated it is exact but for one rounding, so that its bits are
/// others there.
TANDEM_DEVICE float exp2_estimate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// Pair of bf16, rounded to nearest even, `low` in the lower half (PTX ISA, cvt.rn.bf16x2.f32): the bits of
/// numerics::round_to_bf16 but for NaNs, which become one of them, whatever their sign and payload.
TANDEM_DEVICE std::uint32_t bf16_pair(float low, float high) {
  std::uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

/// Sixteen bytes as they lie in memory.
struct Words {
  std::uint32_t word[4];
};

/// One 16-byte access; the address is a multiple of 16.
TANDEM_DEVICE Words load_words(const void* from) {
  const uint4 w = *static_cast<const uint4*>(from);
  return {{w.x, w.y, w.z, w.w}};
}
TANDEM_DEVICE void store_words(void* to, const Words& w) {
  *static_cast<uint4*>(to) = make_uint4(w.word[0], w.word[1], w.word[2], w.word[3]);
}

/// Copies 16 bytes from global to shared memory, both at multiples of 16, while the thread goes on.
TANDEM_DEVICE void start_copy(void* to, const void* from) {
  const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(address), "l"(from) : "memory");
}
/// Copies like start_copy where `copies`; writes zeros otherwise, and does not read `from`.
TANDEM_DEVICE void start_copy_or_zeros(void* to, const void* from, bool copies) {
  const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(address), "l"(from), "r"(copies ? 16 : 0)
               : "memory");
}
/// Copies like start_copy(), but 4 bytes, at multiples of 4.
TANDEM_DEVICE void start_word_copy(void* to, const void* from) {
  const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" : : "r"(address), "l"(from) : "memory");
}
/// Makes the copies that the thread has started since it last called this, none perhaps, into a group.
TANDEM_DEVICE void close_copies() { asm volatile("cp.async.commit_group;" : : : "memory"); }
/// Waits until at most the thread's last `left` groups are under way. Others see what was copied after a barrier.
template <int left>
TANDEM_DEVICE void await_copies() {
  asm volatile("cp.async.wait_group %0;" : : "n"(left) : "memory");
}

/// Four bytes; the address is a multiple of 4.
TANDEM_DEVICE void store_word(void* to, std::uint32_t word) { *static_cast<std::uint32_t*>(to) = word; }

/// Eight bytes; the address is a multiple of 8.
struct TwoWords {
  std::uint32_t word[2];
};
TANDEM_DEVICE TwoWords load_two_words(const void* from) {
  const uint2 w = *static_cast<const uint2*>(from);
  return {{w.x, w.y}};
}
TANDEM_DEVICE void store_two_words(void* to, const TwoWords& w) {
  *static_cast<uint2*>(to) = make_uint2(w.word[0], w.word[1]);
}

/// Four 8 x 8 matrices of bf16 in shared memory, of which lane l names row l % 8 of matrix l / 8, at a multiple of 16
/// bytes. Word i is elements 2 (l % 4) and the next one of row l / 4 of matrix i: what a product takes (below). All
/// lanes of the warp take part.
TANDEM_DEVICE Words load_matrices(const bf16* row) {
  Words w{};
  const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(w.word[0]), "=r"(w.word[1]), "=r"(w.word[2]), "=r"(w.word[3])
               : "r"(address)
               : "memory");
  return w;
}
/// Loads four matrices like load_matrices, but transposed: elements 2 (l % 4) and the next one of column l / 4.
TANDEM_DEVICE Words load_transposed(const bf16* row) {
  Words w{};
  const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(w.word[0]), "=r"(w.word[1]), "=r"(w.word[2]), "=r"(w.word[3])
               : "r"(address)
               : "memory");
  return w;
}

/// Part of a lane in a 16 x 8 product: rows l / 4 (elements 0 and 1) and l / 4 + 8 (2 and 3), columns 2 (l % 4) and the
/// next one.
struct ProductPart {
  float x[4];
};
/// c += a b on tensor cores, a (16, 16) and b (16, 8) of bf16, sums in fp32 (PTX ISA, mma.m16n8k16). Words 0 and 1 of
/// a: columns 0 to 7 of rows l / 4 and l / 4 + 8; words 2 and 3: columns 8 to 15. b0, b1: rows 0 to 7 and 8 to 15 of
/// column l / 4. All lanes of the warp take part.
TANDEM_DEVICE void multiply_add(ProductPart& c, const Words& a, std::uint32_t b0, std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c.x[0]), "+f"(c.x[1]), "+f"(c.x[2]), "+f"(c.x[3])
      : "r"(a.word[0]), "r"(a.word[1]), "r"(a.word[2]), "r"(a.word[3]), "r"(b0), "r"(b1));
}

template <class... P>
void start_kernel(const char* name, void (*kernel)(P...), const Geometry& geometry, CUstream_st* stream,
                  P... arguments) {
  if (geometry.shared_bytes > shared_without_asking - static_beside_dynamic) {
    runtime::require_launched(
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(geometry.shared_bytes)),
        name);
  }
  // kernel<<<...>>> returns nothing: the error asked for after it may be an older one, of the program that tandem is a
  // part of.
  std::array<void*, sizeof...(P)> addresses{&arguments...};
  runtime::require_launched(
      cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(geometry.grid)),
                       dim3(static_cast<unsigned>(geometry.block)), addresses.data(), geometry.shared_bytes, stream),
      name);
}

}  // namespace tandem::gpu
