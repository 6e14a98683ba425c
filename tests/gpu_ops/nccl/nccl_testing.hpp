#pragma once
// Ranks on cards of the fake machine, connected by the fake NCCL.
#include <cstdlib>
#include <memory>

#include "comm/rendezvous.hpp"
#include "core/device/group.hpp"
#include "tests/gpu_ops/fake_nccl/fake_nccl.hpp"

namespace tandem::testing {

/// The fake NCCL of this process, which is found from now on.
inline const fake_nccl::FakeNccl& fake_nccl() {
  static const fake_nccl::FakeNccl fake = [] {
    ::setenv("TANDEM_CUDA_LIBS", TANDEM_FAKE_NCCL_FOLDER, 1);
    return fake_nccl::FakeNccl(TANDEM_FAKE_NCCL_FOLDER "/libnccl.so.2");
  }();
  return fake;
}

/// A group over NCCL of a rank that has joined others.
std::unique_ptr<Group> group_by_nccl(std::unique_ptr<Rendezvous> rendezvous, Device& device, double watchdog_seconds);

}  // namespace tandem::testing
