#pragma once
// Status of an engine: the open step or evaluation, and whether its state is that of a step.
#include <cstdint>
#include <string_view>
#include <vector>

#include "offload/engine/engine_parts.hpp"

namespace tandem {

/// The step or the evaluation that is open.
struct OpenPass {
  enum class Kind : std::uint8_t { none, step, evaluation };

  /// The step will not end as one; other ranks, which would wait for what does not come, are told.
  void abandon(EngineParts& parts, std::string_view why);

  Kind kind = Kind::none;
  bool gradients_ended = false;  ///< the step's: they are complete, and what becomes of them is to be decided
  bool abandoned = false;        ///< the step; the next call that begins something drops it
  bool may_be_absent = false;    ///< the step's gradients, of some layers or parameters
};

/// Whether the engine's state is that of a step, and of which.
struct StateStatus {
  /// `unfinished`: what was to change the state could not be finished.
  enum class Is : std::uint8_t { unset, whole, unfinished };

  /// Throws MisuseError where there is no state, TrainingError where it is of no step.
  void require_whole() const;

  Is is = Is::unset;
  std::int64_t step = 0;  ///< updates applied so far
  /// Updates that left a parameter as it was, by its index among the owned ones; empty: none did so.
  std::vector<std::int64_t> missed;
};

}  // namespace tandem
