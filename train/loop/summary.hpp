#pragma once
// summary.json of a finished run.
#include <cstdint>
#include <string>

#include "train/loop/prepared_run.hpp"
#include "train/loop/step_statistics.hpp"
#include "train/runtime/rank_workers.hpp"

namespace tandem {

/// Reason for which a run ended: all steps taken, --patience, or a signal.
enum class EndReason : std::uint8_t { steps, patience, signal };

/// The summary of a run and its steps. `digest`: digest of its state.
std::string summary_json(const PreparedRun& run, const StepSummary& steps, const RankTotals& totals,
                         const std::string& digest, EndReason reason);

/// The `summary` of the run that took the steps to this state, with the loss of a new validation; empty where it is of
/// another state. For a run that takes no steps: it has measured nothing, and has at most validated anew.
std::string summary_of_earlier_steps(const std::string& summary, const RunRecord& record, const std::string& digest,
                                     EndReason reason);

}  // namespace tandem
