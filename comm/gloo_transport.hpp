#pragma once
// Gloo (github.com/facebookincubator/gloo) between hosts, by TCP.
#include <cstddef>
#include <memory>

#include "comm/peer_transport.hpp"
#include "comm/rendezvous.hpp"

namespace tandem {

/// Bytes of pinned host memory that a Gloo transport takes: bytes pass through it on their way from and to the device.
constexpr std::size_t gloo_staging_bytes = std::size_t{8} << 20;

/// Connects all ranks of `rendezvous` with each other, each at the address at which it reaches rank 0, and checks that
/// the ranks are on the other sides. Blocks. Bytes of the device, which must outlive the transport, cross as they are.
/// A call waits for the stream, and has ended when it returns. `watchdog_seconds`: how long a call waits for another
/// rank without anything moving. A process that SIGPIPE would end ignores it from then on. Throws DeviceError where the
/// connections cannot be had, and what has ended the rendezvous.
std::unique_ptr<PeerTransport> make_gloo_transport(Rendezvous& rendezvous, Device& device,
                                                   double watchdog_seconds = 300.0);

}  // namespace tandem
