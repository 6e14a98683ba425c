#pragma once
// How a run saves while it trains, and what that costs, before it happens.
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "core/params/parameter_layout.hpp"
#include "offload/engine/state_io.hpp"
#include "scheduler/machine/cost_model.hpp"
#include "scheduler/machine/profile.hpp"
#include "scheduler/plan/plan.hpp"

namespace tandem {

/// Slowdown by a save: `steps` steps take `factor` times as long as others.
struct SaveSlowdown {
  double factor = 1.0;
  int steps = 0;
  /// "1.31 x for 2 steps".
  std::string text() const;
};

/// How a run saves while it trains.
struct Saving {
  std::int64_t every = 0;                  ///< steps; 0: at the end alone
  SavedState saved = SavedState::all;      ///< parameters whose values its checkpoints hold
  bool copies = false;                     ///< from a copy of the state; else out of the engine, for which updates wait
  std::optional<SaveSlowdown> slowdown{};  ///< predicted, where disk and machine are known
  /// A line for people, "" where it saves at the end alone.
  std::string text() const;
};

/// Simulates the steps from the beginning of a save until it has no effect on them any more: until all state has been
/// read, or, where it is copied first, until the copy has been written as SavePace does. `disk`: bytes a second, 0: as
/// the profile has it. None where nobody knows the disk.
std::optional<SaveSlowdown> predict_saving(const Saving& how, const ParameterLayout& layout, const Plan& plan,
                                           MachineProfile profile, std::span<const LayerSeconds> compute,
                                           double disk = 0.0);

}  // namespace tandem
