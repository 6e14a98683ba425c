#pragma once
// A profiler that keeps the NVTX ranges it is told of.
#include <cstdint>
#include <string>
#include <vector>

namespace tandem::fake_profiler {

struct SeenRange {
  std::string lane;  ///< its category's name
  std::string name;
  std::uint64_t bytes = 0;
  bool ended = false;
};

/// From now on a profiler is attached or is not; what was seen is forgotten.
void attach(bool attached);
/// In the order in which they began.
std::vector<SeenRange> seen();
/// Domains created and not destroyed.
int domains();

}  // namespace tandem::fake_profiler
