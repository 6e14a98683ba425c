#pragma once
// Handle of a CUDA device's stream, as kernels and libraries take it.
#include "core/device/device.hpp"

struct CUstream_st;

namespace tandem {

/// The native handle of a stream of a CudaDevice, valid while the stream lives. Makes its device current in
/// the calling thread, as launches need it. Throws MisuseError for a stream of another backend, and what
/// failed the stream where it has failed: work on it would be dropped.
CUstream_st* native_stream(StreamView stream);

}  // namespace tandem
