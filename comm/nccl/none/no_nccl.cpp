// NCCL in a build without the CUDA device.
#include "comm/nccl/nccl_transport.hpp"
#include "core/base/error.hpp"

namespace tandem {

std::unique_ptr<PeerTransport> make_nccl_transport(Rendezvous& /*rendezvous*/, Device& device,
                                                   double /*watchdog_seconds*/) {
  throw MisuseError("NCCL is given a device of another kind", device.info().name);
}

}  // namespace tandem
