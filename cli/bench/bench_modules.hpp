#pragma once
// `tandem bench --modules`: one step by kinds of modules.
#include <string>

#include "train/config/config.hpp"
#include "train/hf/model_source.hpp"

namespace tandem {

struct ModulesRequest {
  TrainConfig config;  ///< one policy, the sequence length resolved
  ModelSource source;
  std::string profile;  ///< machine that is simulated; empty: executes here
  std::string out;      ///< new folder for modules.json; empty: none
  std::string command;
  int steps = 5;
  bool json = false;
};

/// Prints the step, and writes it where that is asked for. Returns the exit code. Throws PlanError, DeviceError,
/// WriteError.
int bench_modules(ModulesRequest request);

}  // namespace tandem
