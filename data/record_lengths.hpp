#pragma once
// Lengths of the records in windows of the data, by which the planner counts what is attended.
#include <cstdint>
#include <map>

#include "data/token_source.hpp"

namespace tandem {

/// Lengths of records in windows and how many targets those hold, from up to 1,024 windows spread evenly over the data.
struct WindowStatistics {
  std::map<std::int64_t, std::int64_t> records{};  ///< length in inputs -> how many; padding is a record, too
  std::int64_t windows = 0;
  std::int64_t targets = 0;
};

/// Statistics of windows of `length` inputs, as read_window gives them. Throws as require_windows and read_window.
WindowStatistics window_statistics(const TokenSource& source, std::int64_t length);

}  // namespace tandem
