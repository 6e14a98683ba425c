#pragma once
// Number, place and secret of a rank, as launchers of several processes give them: torchrun, mpirun, srun, or whoever
// sets the same variables.
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "core/device/group.hpp"

namespace tandem {

struct LaunchFacts {
  Rank rank;
  int local_rank = 0;  ///< among those on this machine: the number of its GPU
  std::string host;    ///< address of rank 0
  int port = 0;
  std::string secret;
  bool operator==(const LaunchFacts&) const = default;
};

/// Value of a variable of the environment; nothing where it is not set.
using Environment = std::function<std::optional<std::string>(std::string_view name)>;

constexpr int default_launch_port = 29500;

/// Facts of this process' launch; nothing where it is not one of several. The first of these that is there counts:
/// WORLD_SIZE or RANK, OMPI_COMM_WORLD_SIZE, PMI_SIZE, SLURM_STEP_NUM_TASKS (which srun sets for its own processes,
/// where SLURM_NTASKS is that of the whole job). The address is MASTER_ADDR; without it that of the loopback where all
/// ranks are on one machine. The port is MASTER_PORT or default_launch_port; where torchrun's own agent listens at that
/// port (TORCHELASTIC_USE_AGENT_STORE), the next one, and the one before after the last. The secret is TANDEM_TOKEN.
/// Throws UsageError, which names the variable and the command that sets it.
std::optional<LaunchFacts> launch_facts(const Environment& environment);

}  // namespace tandem
