#pragma once
// The end of a program in which something has stalled for good.
#include <chrono>

#include "core/base/error.hpp"

namespace tandem {

/// Leaves the program so long to end by itself, then says what has stalled and ends it with that error's exit code,
/// whatever its destructors wait for; two seconds later without a word, where standard error takes none. Returns at
/// once. Where the system has no thread left for this, the program ends now.
void end_process_after(const StalledError& error, std::chrono::milliseconds grace);

}  // namespace tandem
