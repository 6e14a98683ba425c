#pragma once
// Causal attention by plain kernels: blocks of queries against blocks of keys with a running maximum and sum
// (Dao et al., arXiv 2205.14135), so that (T, T) never exists. fp32 arithmetic on f32 or bf16. Every sum has one
// owner and a fixed order: no atomics. Operands as in core/ops.hpp; head dimensions up to 256.
#include "core/ops.hpp"

struct CUstream_st;

namespace tandem::gpu {

constexpr std::int64_t most_head_dim = 256;

/// Asynchronous. Throws MisuseError for a larger head dimension, DeviceError.
void attention(HeadsView q, HeadsView k, HeadsView v, TensorView out, TensorView lse, const AttentionShape& shape,
               CUstream_st* stream);

/// Device scratch of one backward call over `tokens` = B T.
std::size_t attention_backward_scratch(std::int64_t tokens, std::int64_t heads);
/// Asynchronous. Computes the scores twice, once for dq and once for dk and dv, so that each has one owner.
void attention_backward(TensorView dout, HeadsView q, HeadsView k, HeadsView v, TensorView out, TensorView lse,
                        HeadsView dq, HeadsView dk, HeadsView dv, const AttentionShape& shape, void* scratch,
                        CUstream_st* stream);

/// What of it enters the compute key.
inline const char* attention_key() { return "plain"; }

}  // namespace tandem::gpu
