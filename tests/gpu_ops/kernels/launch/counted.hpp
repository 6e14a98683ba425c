#pragma once
// Launches by the names of their kernels, counted since the last clear(). None is run.
#include <map>
#include <string>

namespace tandem::testing {

std::map<std::string, int>& launches();

}  // namespace tandem::testing
