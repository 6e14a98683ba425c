#include "gpu_ops/attention.hpp"

namespace tandem::gpu {
namespace {

class PlainAttention final : public Attention {
 public:
  std::size_t scratch_bytes(const AttentionShape& shape, DType) const override {
    return plain_attention_scratch(shape.batch * shape.sequence, shape.heads);
  }
  void forward(const AttentionForward& call, void*, CUstream_st* stream) override { plain_attention(call, stream); }
  void backward(const AttentionBackward& call, void* scratch, CUstream_st* stream) override {
    plain_attention_backward(call, scratch, stream);
  }
};

}  // namespace

std::unique_ptr<Attention> make_plain_attention() { return std::make_unique<PlainAttention>(); }

}  // namespace tandem::gpu
