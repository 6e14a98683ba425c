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

/// Attaches a profiler from now on, or detaches it; what was seen is forgotten.
void attach(bool attached);
/// Ranges in the order in which they began.
std::vector<SeenRange> seen();
/// Domains created and not destroyed.
int domains();

}  // namespace tandem::fake_profiler
