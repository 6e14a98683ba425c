#pragma once
// Checkpoint that a run goes on from.
#include <cstdint>
#include <filesystem>
#include <limits>
#include <memory>

#include "io/checkpoint.hpp"
#include "train/loop/train_request.hpp"

namespace tandem {

/// Whether it is to resume one checkpoint, not the newest of a run.
bool names_a_checkpoint(const TrainRequest& request);

/// The one that was named, or the newest one of a run that looks good, made before step `before`: what it holds is
/// checked as it is loaded. Null where the run starts fresh, which is warned of where it was to resume. Throws
/// InputError.
std::unique_ptr<Checkpoint> find_checkpoint(const TrainRequest& request,
                                            std::int64_t before = std::numeric_limits<std::int64_t>::max());

/// The checkpoint of that name which another process has found for the same request. Throws InputError.
std::unique_ptr<Checkpoint> open_chosen(const TrainRequest& request, const std::string& name);

/// Whether a folder has checkpoints of later steps.
bool has_later_checkpoints(const std::filesystem::path& root, std::int64_t step);

}  // namespace tandem
