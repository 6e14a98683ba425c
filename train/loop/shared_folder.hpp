#pragma once
// A folder that all processes of a run see.
#include <filesystem>

#include "train/setup/processes.hpp"

namespace tandem {

/// Makes the folder, by the first process, and checks that each finds there what that one has written. A call of all
/// processes. Throws UsageError on all, which names those that do not see it, and leaves nothing behind; WriteError.
void share_folder(const std::filesystem::path& folder, Processes& processes);

}  // namespace tandem
