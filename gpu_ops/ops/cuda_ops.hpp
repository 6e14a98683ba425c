#pragma once
// core/ops/ops.hpp on a CUDA device. No header of CUDA is seen here.
#include <memory>
#include <string>

#include "core/ops/ops.hpp"

namespace tandem {

/// Operations on the device that is current in the calling thread, now and in every later call. Takes f32
/// and bf16 activations; matrix products of f32 activations run in a plain kernel of ours, which is far
/// slower than the library's bf16: meant for comparison. Throws DeviceError where cuBLASLt is not found.
/// Attention is cuDNN's where it can be, else a plain kernel's: `slower`, which may be empty, is told why, and of a
/// matrix product that cuBLASLt does not take.
/// Tokens outside the vocabulary, which the caller excludes, write NaN and touch no other memory.
std::unique_ptr<Ops> make_cuda_ops(Notice slower = {});

/// Part of the compute key that the libraries behind these operations determine: the version of cuBLASLt, and who
/// computes attention, as make_cuda_ops() found. Throws as make_cuda_ops() does.
std::string cuda_ops_key();

}  // namespace tandem
