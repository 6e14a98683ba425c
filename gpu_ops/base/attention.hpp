#pragma once
// Causal attention. Two implementations: cuDNN's (attention_cudnn.cpp), and plain kernels (kernels/attention*.cu)
// that are the reference, serve the emulated build and builds without cuDNN's headers, and take what the library does
// not, such as packed rows: its deterministic backward keeps gradients of scores for whole rows of each record. Both
// keep the same statistics, so that either's backward may follow either's forward.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "core/ops/ops.hpp"

struct CUstream_st;

namespace tandem::gpu {

constexpr std::int64_t most_head_dim = 256;  ///< largest head dimension of the plain kernels
constexpr const char* plain_is_slower = "attention runs in plain kernels, which are slower: ";

/// Operands as in core/ops/ops.hpp. `lse` is the natural logarithm of each row's sum of exp(scale q k).
struct AttentionForward {
  HeadsView q, k, v;
  TensorView out;
  TensorView lse;  ///< may be empty
  AttentionShape shape;
};
struct AttentionBackward {
  TensorView dout;
  HeadsView q, k, v;
  TensorView out, lse;
  HeadsView dq, dk, dv;
  AttentionShape shape;
};

class Attention {
 public:
  virtual ~Attention() = default;
  /// Device memory that one call over `shape`, or over fewer sequences of that length, may use as scratch: a function
  /// of its arguments alone.
  virtual std::size_t scratch_bytes(const AttentionShape& shape, DType activations) const = 0;
  /// Asynchronous on `stream`. `scratch` (device, `scratch_bytes()`) is used until the stream has passed the call. The
  /// same bits for the same shapes, strides and operands. Throws MisuseError for a head dimension above most_head_dim,
  /// DeviceError.
  virtual void forward(const AttentionForward& call, void* scratch, CUstream_st* stream) = 0;
  virtual void backward(const AttentionBackward& call, void* scratch, CUstream_st* stream) = 0;
};

/// The implementation of this build, on the device that is current. cuDNN's gives way to the plain one where the
/// library is not found, is too old or does not start, and to the plain kernels for calls that it does not take;
/// `slower`, which may be empty, is told once, by the first call that is not the library's.
std::unique_ptr<Attention> make_attention(Notice slower);
/// "cudnn 92600 frontend 12600 nvrtc 13.0", "plain": what of it enters the compute key. After make_attention() it says
/// what that found.
std::string attention_key();

/// The plain kernels, whatever the build. The first call tells `slower`, which may be empty, `why` it is they that run.
std::unique_ptr<Attention> make_plain_attention(Notice slower = {}, std::string why = {});

/// Limits of one launch of the plain kernels. Where a GPU also drives a screen, a long launch blocks that, and below
/// Windows the system may end a launch of two seconds: long sequences go in parts.
struct AttentionLimits {
  double multiply_adds = 0x1p36;   ///< largest work of a launch, a seventh of a second at 1 TFLOP/s
  std::int64_t least_tiles = 256;  ///< smallest number of tiles, whatever their work: a large card takes them at once
};
/// Limits of the kernels on tensor cores: a fifth of a second on the smallest cards, which do some 5 TFLOP/s, and
/// several times the tiles that a large card takes at once, so that little of it is idle while the last ones end.
constexpr AttentionLimits tensor_limits{.multiply_adds = 0x1p39, .least_tiles = 1024};
/// Number of tiles for one launch, where the largest tile takes `of_largest` multiply-adds.
std::int64_t tiles_at_once(double of_largest, const AttentionLimits& limits);

/// Blocks of queries against blocks of keys with a running maximum and sum (Dao et al., arXiv 2205.14135), so that (T,
/// T) never exists. fp32 arithmetic; products of bf16 are those of tensor cores, for which weights
/// and gradients of scores are rounded. Blocks out of each other's window are left out. Every sum has one owner
/// and a fixed order: no atomics.
/// Asynchronous, and throw, as Attention::forward and Attention::backward do; the latter computes the scores twice,
/// once for dq and once for dk and dv. Bits do not depend on `limits`, without which they are those of the kernels
/// that run.
void plain_attention(const AttentionForward& call, CUstream_st* stream,
                     const std::optional<AttentionLimits>& limits = {});
void plain_attention_backward(const AttentionBackward& call, void* scratch, CUstream_st* stream,
                              const std::optional<AttentionLimits>& limits = {});

}  // namespace tandem::gpu
