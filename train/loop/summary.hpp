#pragma once
// summary.json of a finished run.
#include <string>

#include "offload/engine/engine.hpp"
#include "train/loop/prepared_run.hpp"
#include "train/loop/step_statistics.hpp"

namespace tandem {

/// What a run says of itself and its steps. `counters`: of all its ranks; `digest`: of its state.
std::string summary_json(const PreparedRun& run, const StepSummary& steps, const EngineCounters& counters,
                         const std::string& digest);

/// What the run that took the steps to this state has said, in `summary`; empty where it has not come to that. A run
/// that takes none has measured nothing, and has at most validated anew.
std::string summary_of_earlier_steps(const std::string& summary, const RunRecord& record, const std::string& digest);

}  // namespace tandem
