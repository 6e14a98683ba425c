#pragma once
// The one way in which a kernel is started. Only kernel files (kernels/*.cu) include this header. They are
// written in the small vocabulary of <kernel_language.hpp>: indices, shared memory, barriers, exchanges
// within a warp, 16-byte accesses. The build chooses which: cuda/ for nvcc, emulation/ for the C++
// compiler, where the same text runs on fibers (see emulation/grid.hpp).
#include <kernel_language.hpp>
#include <utility>

#include "gpu_ops/base/geometry.hpp"

struct CUstream_st;

namespace tandem::gpu {

/// Queues kernel(args...) on `stream` over `geometry`; nothing where the grid is empty. Asynchronous: what
/// the arguments point to must stay valid until the stream has passed it. Throws DeviceError where the
/// driver refuses the launch, or reports what an earlier kernel did.
template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), const Geometry& geometry, CUstream_st* stream,
            Arguments&&... arguments) {
  if (geometry.grid == 0) return;
  start_kernel(name, kernel, geometry, stream, static_cast<Parameters>(std::forward<Arguments>(arguments))...);
}

}  // namespace tandem::gpu
