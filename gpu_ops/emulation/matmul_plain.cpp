// Matrix products of the emulated build: the plain kernel.
#include "gpu_ops/base/matmul.hpp"

namespace tandem::gpu {
namespace {

class PlainMatmul final : public Matmul {
 public:
  std::size_t workspace_bytes() const noexcept override { return 0; }
  void run(const Product& product, void*, CUstream_st* stream) override { plain_matmul(product, stream); }
  void run(const Fp8Product& product, void*, CUstream_st* stream) override { plain_matmul(product, stream); }
};

}  // namespace

std::unique_ptr<Matmul> make_matmul(int, Notice) { return std::make_unique<PlainMatmul>(); }
std::string matmul_key() { return "plain"; }

}  // namespace tandem::gpu
