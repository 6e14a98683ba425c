// A kernel whose array lies in memory, as its indices are known only when it runs: planted, so that the refusal is seen to work.
__global__ void indexed_kernel(const int* from, int* to) {
  int values[16] = {};
  for (int i = 0; i < 64; ++i) values[from[i] & 15] += i;
  to[threadIdx.x] = values[from[threadIdx.x] & 15];
}
