// The build without a CUDA device.
#include "api/cuda_backend.hpp"
#include "core/base/error.hpp"

namespace tandem {

std::string why_no_cuda() { return "this build has no CUDA"; }

std::unique_ptr<Device> open_cuda(int, const DeviceOptions&) {
  throw DeviceError("device 'cuda'", why_no_cuda(), "use --device host, or build with -DTANDEM_CUDA=ON");
}

}  // namespace tandem
