#pragma once
// Default streams of the fake: the legacy one of each card, which blocking streams wait for and which waits for them,
// and one of each thread and card. Internal to the fake runtime.
#include "tests/gpu_ops/fake_runtime/fake_machine.hpp"

namespace tandem::fake_cuda {

/// The stream that a handle means in the calling thread, on its current card.
CUstream_st* stream_of(CUstream_st* handle);
/// Queues work behind all that default streams have it wait for: on the legacy stream behind what blocking streams have
/// by then, on a blocking stream behind what the legacy stream has. Non-blocking streams wait for neither.
void issue(CUstream_st* stream, Work work);
/// Lists a stream that is not non-blocking, from its creation to its destruction.
void add_blocking(CUstream_st* stream);
void remove_blocking(CUstream_st* stream);
/// Ends the legacy streams, at the end of what they have.
void forget_legacy_streams();
/// Work that passes `mark` once a stream of `device` gets there.
Work pass_mark(std::string_view kind, std::shared_ptr<Mark> mark, int device);

}  // namespace tandem::fake_cuda
