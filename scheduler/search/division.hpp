#pragma once
// Divisions of the update work between CPU and device, as a search tries them.
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "scheduler/plan/plan.hpp"

namespace tandem {

/// Place of the subgroups that stay on the device among the others: updates run in forward order.
enum class Residents : std::uint8_t { last, first, spread };

/// Division of subgroups: `residents` of them resident; of the others `streamed_share` streamed, spread evenly, so that
/// CPU and device both always have work.
struct Division {
  std::size_t residents = 0;
  double streamed_share = 0.0;
  Residents where = Residents::last;
  auto operator<=>(const Division&) const = default;
};

/// The division closest to the plan.
Division division_of(const Plan& plan);
/// A path for each of `subgroups` subgroups.
std::vector<UpdatePath> paths_of(const Division& division, std::size_t subgroups);

/// Setting that a search varies: a path for each subgroup, and the threads of those on the CPU.
struct Setting {
  std::vector<UpdatePath> paths;
  int update_threads = 0;
  auto operator<=>(const Setting&) const = default;
};

Setting setting_of(const Plan& plan);
/// Changes a setting to one close by: two subgroups exchanged, since where memory is full none becomes resident unless
/// another leaves, or one or two another way; now and then another number of the CPU's `threads` (0: that stays).
void change(Setting& setting, int threads, std::mt19937_64& random);

}  // namespace tandem
