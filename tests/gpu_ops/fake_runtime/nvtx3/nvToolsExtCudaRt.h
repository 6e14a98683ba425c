#pragma once
// Names of streams: the fake keeps them, so that tests can tell streams apart.
#include <cuda_runtime_api.h>

void nvtxNameCudaStreamA(cudaStream_t stream, const char* name);
