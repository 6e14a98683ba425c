#include "data/record_lengths.hpp"

#include <algorithm>
#include <vector>

#include "data/window_sampler.hpp"

namespace tandem {
namespace {

constexpr std::int64_t most_windows = 1024;

}  // namespace

WindowStatistics window_statistics(const TokenSource& source, std::int64_t length) {
  const std::int64_t all = require_windows(source, length);
  WindowStatistics statistics{.windows = std::min(all, most_windows)};
  const auto size = static_cast<std::size_t>(length);
  std::vector<std::int32_t> inputs(size), targets(size), first(size), end(size);
  for (std::int64_t i = 0; i < statistics.windows; ++i) {
    // Index i * all / windows, of which the product alone may overflow.
    const std::int64_t index = all / statistics.windows * i + all % statistics.windows * i / statistics.windows;
    statistics.targets += read_window(source, index, {inputs, targets, first, end});
    for (std::int64_t at = 0; at < length; at = end[static_cast<std::size_t>(at)]) {
      ++statistics.records[end[static_cast<std::size_t>(at)] - at];
    }
  }
  return statistics;
}

}  // namespace tandem
