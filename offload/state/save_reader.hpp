#pragma once
// The reading side of a save: state handed out task by task, in the order of a checkpoint, while later steps run.
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/device/group.hpp"
#include "core/params/parameter_layout.hpp"
#include "offload/execution/executor.hpp"
#include "offload/state/state_access.hpp"
#include "scheduler/tasks/task.hpp"

namespace tandem {

/// Used by one thread, whichever. What it is not asked for before it goes, updates no longer wait for.
class SaveReader {
 public:
  /// `tasks` are all that Lowering::save has emitted, and taken over by the executor before the first `read`. What is
  /// given by reference must outlive it, and so must `group`, null where there is one rank.
  SaveReader(Executor& executor, const StateAccess& access, const ParameterLayout& layout, Group* group,
             std::vector<Task> tasks);
  ~SaveReader();
  SaveReader(const SaveReader&) = delete;
  SaveReader& operator=(const SaveReader&) = delete;

  /// See OffloadEngine::SaveScope. Frozen parameters may be left out.
  void read(const Parameter& parameter, StateArray array, std::int64_t first, std::span<float> values);
  void read_own(const Parameter& parameter, StateArray array, std::int64_t first, std::span<float> values);

 private:
  void pass_over_frozen(const Parameter& parameter);
  const Task& expected(const Parameter& parameter, StateArray array, std::int64_t element) const;

  Executor& executor_;
  const StateAccess& access_;
  const ParameterLayout& layout_;
  Group* group_;
  const std::vector<Task> tasks_;
  std::size_t next_ = 0;  ///< the task that is read, or will be
  bool begun_ = false;
  std::int64_t element_ = 0;  ///< next element in the layer's flat arrays, once begun
};

}  // namespace tandem
