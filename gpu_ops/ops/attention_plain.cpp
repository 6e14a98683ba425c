// Attention of builds without cuDNN's headers, and of the emulated one: the plain kernels.
#include <utility>

#include "gpu_ops/base/attention.hpp"

namespace tandem::gpu {

std::unique_ptr<Attention> make_attention(Notice slower) {
  return make_plain_attention(std::move(slower), "this build has no cuDNN");
}

std::string attention_key() { return "plain"; }

}  // namespace tandem::gpu
