#include "offload/engine/engine_status.hpp"

#include <exception>

#include "core/base/error.hpp"

namespace tandem {

void OpenPass::abandon(EngineParts& parts, std::string_view why) {
  abandoned = true;
  if (parts.group != nullptr) parts.give_up(std::make_exception_ptr(DeviceError(why)));
}

void StateStatus::require_whole() const {
  if (is == Is::unset) {
    throw MisuseError("the engine has no state yet", {}, "initialize it, or load a checkpoint");
  }
  if (is == Is::unfinished) {
    throw TrainingError("the state is of no step",
                        "an update during backward, a change of plan, or making or loading it did not come to its end",
                        "go on from the last checkpoint");
  }
}

}  // namespace tandem
