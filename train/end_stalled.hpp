#pragma once
// The end of a program in which something has stalled for good.
#include <chrono>

#include "core/error.hpp"

namespace tandem {

/// Leaves the program so long to end by itself, then says what has stalled and ends it with that error's exit code,
/// whatever its destructors wait for. Returns at once.
void end_process_after(const StalledError& error, std::chrono::milliseconds grace);

}  // namespace tandem
