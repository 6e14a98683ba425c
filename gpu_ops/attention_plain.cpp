// Attention of builds without cuDNN's headers, and of the emulated one: the plain kernels.
#include "gpu_ops/attention.hpp"

namespace tandem::gpu {

std::unique_ptr<Attention> make_attention(Notice slower) {
  if (slower) slower("attention runs in plain kernels, which are slower: this build has no cuDNN");
  return make_plain_attention();
}

std::string attention_key() { return "plain"; }

}  // namespace tandem::gpu
