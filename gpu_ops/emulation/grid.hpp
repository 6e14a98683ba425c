#pragma once
// A grid of blocks run on the calling thread: blocks one after another, the threads of a block as fibers that
// switch where they wait for each other. What real hardware leaves open is drawn from a seed: the order of
// blocks, that of threads between two barriers, and whether warps keep pace (odd seeds) or one runs ahead as far
// as it can (even seeds). Shared memory starts as NaNs in blocks of memory of
// exactly the size asked for, so that an unwritten read shows, and AddressSanitizer sees one past the end. Copies that
// a thread does not wait for are made where it starts them, or where it waits for them. ThreadSanitizer takes the
// threads of a block for threads, between which barriers order memory and nothing else does: not the order in which
// they run, nor exchanges within a warp. Blocks it sees one after another.
#include <cstddef>
#include <cstdint>
#include <functional>

#include "gpu_ops/base/geometry.hpp"

struct CUstream_st;

namespace tandem::emulation {

constexpr std::int64_t no_barrier = -1;

/// How the grids that start from now on are run, in every thread of the program.
struct Schedule {
  std::uint64_t seed = 1;
  /// Barrier that each thread passes without waiting, counted from 0, block and warp barriers together: a planted
  /// fault.
  std::int64_t dropped_barrier = no_barrier;
};
void set_schedule(const Schedule& schedule);
/// Most barriers that a thread passed in any grid since the last set_schedule().
std::int64_t barriers_passed();

/// Runs `kernel` in every thread of every block; returns when all are done. Rethrows what it throws. Throws
/// MisuseError where threads of a block wait for others that have ended or wait elsewhere.
void run_grid(const char* name, const gpu::Geometry& geometry, const std::function<void()>& kernel);

/// Queues `work`, the grid of kernel `name`, on a stream. Provided by whoever plays the runtime.
void enqueue(const char* name, CUstream_st* stream, std::function<void()> work);

/// Shows an argument of kernel `name` at its launch to whoever plays the runtime, who knows where device memory lies.
void see_argument(const char* name, const void* argument, std::size_t bytes);

/// Whether runtime::require_alive() finds the device lost, in programs that run kernels where they are launched.
void lose_device(bool lost);

// -- called from within a kernel ---------------------------------------------------------------------------------

/// Position of the running thread.
struct Position {
  int thread = 0;
  int block_size = 0;
  std::int64_t block = 0;
  std::int64_t grid = 0;
};
const Position& position();

void barrier();
void warp_barrier();
/// Hands `bits` to the other lanes of the warp; their values by lane, valid until the next call.
const std::uint64_t* exchange(std::uint64_t bits);
/// Tells ThreadSanitizer that the running thread reads there.
void see_read(const void* from, std::size_t bytes);
/// Copies in groups, as <kernel_language.hpp> says.
void start_copy(void* to, const void* from, std::size_t bytes);
void close_copies();
void await_copies(int left);
/// The next shared array of this thread: the n-th call of every thread of a block gets the same memory.
void* shared_array(std::size_t bytes);
void* dynamic_shared();
/// Throws MisuseError unless `address` is a multiple of `bytes`.
void require_aligned(const void* address, int bytes = 16);

}  // namespace tandem::emulation
