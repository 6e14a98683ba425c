#pragma once
// The reference of DPO: the model as it is at the beginning of a run, by the log-probabilities that it gives to the
// records of the run's data.
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "train/loop/prepared_run.hpp"
#include "train/runtime/rank_workers.hpp"

namespace tandem {

/// Log-probabilities of all records under the reference, in their order; empty where the run needs none, or its steps
/// compute them.
struct Reference {
  std::vector<float> training, evaluation;
};

/// Folder in that of a run that learns preferences over adapters which it goes on from: these, as PEFT has them.
constexpr const char* reference_adapter_folder = "reference-adapter";

/// Folders of a run in which its reference lies: `out`, empty where nothing is saved, and that of the checkpoint that
/// the run goes on from, empty where it begins.
struct ReferenceFolders {
  std::filesystem::path out, resumed;
};

/// The reference of a run that learns preferences. A run that goes on reads what it kept; one that begins takes
/// NAME.scores.safetensors beside its data where they are of these weights and this data, else computes them by
/// `workers`, whose state is that of the beginning, and keeps them in `folders.out`. `say` is told what takes time.
/// Blocks. Throws InputError where a run that goes on has none, or of other data; and what evaluation throws. A signal
/// ends it: then there is no result.
std::optional<Reference> find_reference(const PreparedRun& run, RankWorkers& workers, const ReferenceFolders& folders,
                                        const std::function<void(const std::string&)>& say);

/// Keeps the adapters of the reference in `folders.out`, where it has some, and gives them to `workers` where steps
/// compute with them: those that the run begins with, or, of a run that goes on, those that it kept. Blocks. Throws
/// InputError where it has none any more.
void take_reference_adapters(const PreparedRun& run, RankWorkers& workers, const ReferenceFolders& folders);

}  // namespace tandem
