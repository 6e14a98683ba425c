#pragma once
// What <kernel_language.hpp> of nvcc takes from CUDA, as far as the C++ compiler needs it to start a kernel of which
// nothing is run.
#include <cstddef>
#include <cstdint>

struct CUstream_st;
using cudaStream_t = CUstream_st*;

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorMemoryAllocation = 2 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
struct dim3 {
  explicit dim3(unsigned to_x) : x(to_x) {}
  unsigned x, y = 1, z = 1;
};
struct uint4 {
  std::uint32_t x, y, z, w;
};
struct uint2 {
  std::uint32_t x, y;
};
inline uint2 make_uint2(std::uint32_t x, std::uint32_t y) { return {x, y}; }
inline uint4 make_uint4(std::uint32_t x, std::uint32_t y, std::uint32_t z, std::uint32_t w) { return {x, y, z, w}; }

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
inline const dim3 threadIdx{0}, blockDim{1}, blockIdx{0}, gridDim{1};
inline void __syncthreads() {}
inline void __syncwarp() {}
template <class T>
T __shfl_xor_sync(unsigned, T value, int) {
  return value;
}
template <class T>
T __shfl_down_sync(unsigned, T value, unsigned) {
  return value;
}
template <class T>
T __shfl_sync(unsigned, T value, int) {
  return value;
}
inline int __popc(unsigned word) { return __builtin_popcount(word); }
inline int __ffs(int word) { return __builtin_ffs(word); }
inline unsigned __ballot_sync(unsigned, bool value) { return value ? 1 : 0; }
inline std::size_t __cvta_generic_to_shared(const void* address) { return reinterpret_cast<std::size_t>(address); }

cudaError_t cudaGetLastError();
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value);
cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments, std::size_t shared,
                             cudaStream_t stream);
