#pragma once
// Marks a function as callable from host and device code, so that one text of a formula serves the
// reference kernel, the SIMD tail, the emulated kernel and the CUDA kernel. This folder is the only
// one whose headers may contain conditionals.
#ifdef __CUDACC__
#define TANDEM_HD __host__ __device__ __forceinline__
#else
#define TANDEM_HD inline
#endif
