#pragma once
// NCCL between the GPUs of several processes.
#include <cstddef>
#include <memory>

#include "comm/peer_transport.hpp"
#include "comm/rendezvous.hpp"

namespace tandem {

/// Connects the GPUs of all ranks of `rendezvous` by NCCL, and moves some bytes between each two, to see that they
/// arrive. Blocks. `device`, a CUDA device of which no other rank has the card, and `rendezvous` must outlive the
/// transport. Copies are queued, and add nothing on the way; where a rank fails, or NCCL meets an error, which the
/// rendezvous is then told, streams pass what was queued without it once every later call of the group throws.
/// NCCL itself connects by the interface of the rendezvous' address, unless NCCL_SOCKET_IFNAME names one.
/// `watchdog_seconds`: how long a call waits for NCCL to queue it, or for earlier ones where there are many. A group of
/// one needs no NCCL. Throws, on all ranks: DeviceError where a rank has no NCCL or another version, or cannot connect;
/// what has ended the rendezvous.
std::unique_ptr<PeerTransport> make_nccl_transport(Rendezvous& rendezvous, Device& device,
                                                   double watchdog_seconds = 300.0);

}  // namespace tandem
