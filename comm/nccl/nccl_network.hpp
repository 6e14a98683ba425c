#pragma once
// The network that NCCL uses for itself.
#include <string>

namespace tandem::nccl {

/// Name of the interface that has this address, in numbers: "lo" for "127.0.0.1". Empty where none has it.
std::string interface_of(const std::string& address);

/// Has NCCL connect ranks by the interface that has this address, at which the process has met the others; by itself it
/// takes another where the machine has several, and listens there. Nothing changes where NCCL_SOCKET_IFNAME is set. To
/// be called before NCCL is first used in the process, after which nothing changes it. Sets a variable of the
/// environment.
void use_interface_of(const std::string& address);

}  // namespace tandem::nccl
