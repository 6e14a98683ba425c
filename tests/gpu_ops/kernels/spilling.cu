// A kernel that needs more registers than it may have: planted, so that the check of spills is seen to work.
__global__ void __launch_bounds__(1024, 2) spilling_kernel(float* x) {
  float a[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) a[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; ++i) x[(63 - i) * 1024 + threadIdx.x + 1] = a[i] * a[(i * 7) % 64];
}
