#pragma once
// Request of `tandem train`.
#include <optional>
#include <string>

#include "comm/launch_facts.hpp"
#include "train/config/config.hpp"

namespace tandem {

/// A configuration, and what does not belong in a configuration file.
struct TrainRequest {
  TrainConfig config;
  bool resume = false;
  std::string resume_from;  ///< a checkpoint; empty: the newest good one in --out
  bool dry_run = false;
  bool quiet = false;
  std::optional<LaunchFacts> launch;  ///< place among several processes; none: this one alone
  std::string program = "tandem";     ///< the program as it was called, a word for a shell
  std::string command;                ///< the command as typed, for the summary
};

}  // namespace tandem
