#pragma once
// The parts of an engine that its steps, its guards and its state share.
#include <exception>
#include <optional>

#include "core/base/trace.hpp"
#include "core/device/device.hpp"
#include "core/device/group.hpp"
#include "core/params/parameter_layout.hpp"
#include "offload/execution/executor.hpp"
#include "offload/execution/stall_clock.hpp"
#include "offload/execution/task_runner.hpp"
#include "offload/execution/update_clock.hpp"
#include "offload/state/state_access.hpp"
#include "offload/storage/storage.hpp"
#include "scheduler/plan/plan.hpp"
#include "scheduler/tasks/lowering.hpp"

namespace tandem {

/// Memory and tasks of a plan, and what runs them. One thread uses it, the engine's.
class EngineParts {
 public:
  /// Takes the arguments of OffloadEngine, under the same terms.
  EngineParts(Device& of_device, const ParameterLayout& of_layout, const OffloadOptions& of_options,
              const Plan& of_plan, Trace* trace, Group* of_group);
  EngineParts(const EngineParts&) = delete;
  EngineParts& operator=(const EngineParts&) = delete;

  /// Gives the executor what has been emitted into `tasks`. Does not block.
  void submit();
  /// Emits the copies that can start early, where they are to overlap.
  void prefetch();
  /// Ends the engine's work with an error, which every later call throws.
  void give_up(std::exception_ptr error) { executor.give_up(std::move(error)); }
  /// Runs `body` on this rank. A failure of one rank ends the engines of all. Throws what this rank failed by.
  template <class Body>
  void for_all_ranks(const Body& body) {
    if (group == nullptr) return body();
    try {
      body();
    } catch (...) {  // word of this rank's failure, perhaps, which the group told all
      give_up(std::current_exception());
      executor.require_good();
      throw;
    }
  }

  Device& device;
  Group* group;  ///< null where there is one rank
  const ParameterLayout layout;
  const OffloadOptions options;
  Plan plan;
  Storage storage;
  StateAccess access;
  std::optional<Lowering> lowering;  ///< never empty; another one for another plan
  TaskRunner runner;
  TaskList tasks;     ///< emitted and not submitted
  StallClock stalls;  ///< stalls of the caller's streams in waits for updates
  UpdateClock updates;
  Executor executor;  // last: it stops before what its tasks use goes
};

}  // namespace tandem
