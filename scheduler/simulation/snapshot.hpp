#pragma once
// Totals of a simulated step at one time of it, and whether passes repeat each other.
#include <cmath>
#include <cstdint>
#include <vector>

#include "scheduler/machine/cost_model.hpp"

namespace tandem {

/// Work done, and the seconds that it took.
struct Done {
  double seconds = 0.0;
  double amount = 0.0;  ///< bytes or parameters
  double rate() const noexcept { return seconds > 0.0 ? amount / seconds : 0.0; }
  void add(double in_seconds, double more) noexcept {
    seconds += in_seconds;
    amount += more;
  }
  /// Adds `times` times the work between two totals.
  void repeat(double times, const Done& before, const Done& after) noexcept {
    add(times * (after.seconds - before.seconds), times * (after.amount - before.amount));
  }
};

struct Snapshot {
  double now = 0.0;
  std::int64_t pending = 0;  ///< tasks that are not done
  double compute = 0.0;      ///< seconds
  double backward = 0.0;     ///< seconds
  Done to_device, to_host;
  ResourceShares use{};
};

/// Whether the last two of the passes that began at these snapshots took as long and left as much undone: so will those
/// that follow. As long alone is not enough, since the CPU may fall behind while the device keeps its pace.
inline bool repeat(const std::vector<Snapshot>& openings) noexcept {
  constexpr double as_long = 1e-6;
  if (openings.size() < 3) return false;
  const Snapshot* last = &openings.back();
  const double seconds = last[0].now - last[-1].now;
  return last[-2].pending == last[-1].pending && last[-1].pending == last[0].pending &&
         std::abs(seconds - (last[-1].now - last[-2].now)) <= as_long * seconds;
}

}  // namespace tandem
