// The engine's ranks by NCCL, which takes no card twice: as many cards as any test has ranks, and exchanges that lag.
#include "tests/gpu_ops/device/toy_machine.hpp"
#include "tests/gpu_ops/nccl/nccl_testing.hpp"

namespace tandem::testing {
namespace {

[[maybe_unused]] const bool there_are_many = [] {
  constexpr std::size_t most_ranks = 9;
  toy_machine().cards.assign(most_ranks, fake_cuda::Card{});
  const fake_nccl::Behaviour behaviour{.longest_delay_us = 50, .tells_lost_ranks = true};
  fake_nccl().behave(&behaviour);
  return true;
}();

}  // namespace
}  // namespace tandem::testing
