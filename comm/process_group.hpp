#pragma once
// A group of ranks in several processes.
#include <memory>

#include "comm/peer_transport.hpp"
#include "comm/rendezvous.hpp"
#include "core/device/group.hpp"

namespace tandem {

/// This process' end of a group: ranks meet by `rendezvous`, which also carries values of host memory, and bytes of
/// `device`, which must outlive the group, move by `transport`. Waits for ranks that do not come are limited as the
/// rendezvous says. Every call about device memory ends before it returns, or is queued, as the transport does it. The
/// group leaves the rendezvous when it ends, whoever shares it.
std::unique_ptr<Group> make_process_group(std::shared_ptr<Rendezvous> rendezvous,
                                          std::unique_ptr<PeerTransport> transport, Device& device);

}  // namespace tandem
