#pragma once
// Pages of memory that the system has provided.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <vector>

namespace tandem::testing {

/// Pages of [data, data + bytes) that are not there yet. `data` begins a page.
inline std::ptrdiff_t pages_missing(void* data, std::size_t bytes) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> there((bytes + page - 1) / page);
  EXPECT_EQ(::mincore(data, bytes, there.data()), 0);
  return std::ranges::count_if(there, [](unsigned char p) { return (p & 1) == 0; });
}

}  // namespace tandem::testing
