#pragma once
// A profiler as NVTX loads one: a library that is named in NVTX_INJECTION64_PATH, and puts its functions in the place
// of NVTX's own.
#include <cstdint>
#include <string>
#include <vector>

namespace tandem::profiler {

struct SeenRange {
  std::string domain;
  std::string lane;
  std::string name;
  std::uint64_t bytes = 0;
  bool ended = false;
  bool operator==(const SeenRange&) const = default;
};
std::vector<SeenRange> seen();

}  // namespace tandem::profiler
