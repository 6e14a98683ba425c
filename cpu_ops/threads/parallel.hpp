#pragma once
// Makes the data parallelism of this build: oneTBB's, or that of a pool of our own (TANDEM_THREADS).
#include <memory>

#include "core/host/numa_node.hpp"
#include "core/host/parallel.hpp"

namespace tandem {

/// An arena of `threads` threads; 0: one for each processor that this process may run on, or that the node has.
/// Bodies run on the processors of `node` (null: on any), where memory that was placed there is near. Throws
/// MisuseError for a negative count. `run` may be called from any thread, also inside a body.
std::unique_ptr<Parallel> make_parallel(int threads, std::shared_ptr<const NumaNode> node = nullptr);

}  // namespace tandem
