// The transport of a build without Gloo: none.
#include "comm/gloo_transport.hpp"
#include "core/base/error.hpp"

namespace tandem {

std::unique_ptr<PeerTransport> make_gloo_transport(Rendezvous&, Device&, double) {
  throw DeviceError("ranks in several processes", "this tandem was built without Gloo, which moves their bytes",
                    "install libgloo-dev and build it again, or train in one process");
}

}  // namespace tandem
