#pragma once
// How tasks in flight share what they all need.
#include <span>

#include "scheduler/machine/cost_model.hpp"

namespace tandem {

/// Max-min fair speeds in [0, 1], 1 being the task alone on the machine: all speeds rise together until a
/// resource is full, which fixes those that use it, and the rest rise on. So those who meet at a full
/// resource are slowed by the same factor, and no speed can rise without lowering one that is no larger.
/// `speeds` has the size of `costs`.
void fair_speeds(std::span<const TaskCost* const> costs, std::span<double> speeds);

}  // namespace tandem
