#pragma once
// From a stream of the CUDA device to the handle that kernels and libraries take.
#include "core/device/device.hpp"

struct CUstream_st;

namespace tandem {

/// The native handle of a stream of a CudaDevice, valid while the stream lives. Makes its device current in
/// the calling thread, as launches need it. Throws MisuseError for a stream of another backend, and what
/// failed the stream where it has failed: work on it would be dropped.
CUstream_st* native_stream(StreamView stream);

}  // namespace tandem
