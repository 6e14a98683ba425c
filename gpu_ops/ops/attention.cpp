#include "gpu_ops/base/attention.hpp"

#include <algorithm>
#include <utility>

#include "gpu_ops/base/scratch.hpp"

namespace tandem::gpu {
namespace {

class PlainAttention final : public Attention {
 public:
  PlainAttention(Notice slower, std::string why) : slower_(std::move(slower)), why_(std::move(why)) {}

  std::size_t scratch_bytes(const AttentionShape& shape, DType) const override {
    return plain_attention_scratch(shape.batch * shape.sequence, shape.heads);
  }
  void forward(const AttentionForward& call, void*, CUstream_st* stream) override {
    tell();
    plain_attention(call, stream);
  }
  void backward(const AttentionBackward& call, void* scratch, CUstream_st* stream) override {
    tell();
    plain_attention_backward(call, scratch, stream);
  }

 private:
  void tell() {
    if (const Notice slower = std::exchange(slower_, {})) {
      slower(plain_is_slower + why_);
    }
  }

  Notice slower_;
  const std::string why_;
};

}  // namespace

std::int64_t tiles_at_once(double of_largest, const AttentionLimits& limits) {
  return std::max(limits.least_tiles, static_cast<std::int64_t>(limits.multiply_adds / std::max(1.0, of_largest)));
}

std::unique_ptr<Attention> make_plain_attention(Notice slower, std::string why) {
  return std::make_unique<PlainAttention>(std::move(slower), std::move(why));
}

}  // namespace tandem::gpu
