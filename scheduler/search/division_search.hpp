#pragma once
// Looks for a division of the updates that is faster than every fixed policy's.
#include <cstdint>

#include "scheduler/search/trials.hpp"

namespace tandem {

/// Goes on from the policies that `trials` holds, of which one fits at least, and leaves there what it finds. What it
/// may spend is counted in simulated tasks, so that the same question has the same answer on every machine.
class DivisionSearch {
 public:
  /// Both arguments must outlive the object.
  DivisionSearch(const SearchInput& input, Trials& trials) : in_(input), trials_(trials) {}

  void run();
  /// CPU's share of the state that is not resident, by the closed form.
  double closed_form_cpu_share() const noexcept { return closed_form_cpu_share_; }

 private:
  void try_shares();
  void try_threads();
  void refine(const Division& division, double seconds);
  double seconds_of(const Division& division, double limit);
  std::size_t most_residents(double streamed_share);
  int threads_to_try() const;
  void wander_from_all();
  std::vector<Start> where_to_start();
  Start wander(Start start, double first_threshold, std::int64_t tasks);
  bool may_go_on() const { return trials_.spent() < allowance_ && trials_.best_seconds() > enough_; }

  const SearchInput& in_;
  Trials& trials_;
  double closed_form_cpu_share_ = 0.0;
  double enough_ = 0.0;         ///< seconds that are not worth looking for less
  std::int64_t allowance_ = 0;  ///< tasks that may have been spent when the present part of the search must end
};

}  // namespace tandem
