#pragma once
// What the parts of the lowering share among themselves.
#include <vector>

#include "scheduler/tasks/task.hpp"

namespace tandem {

// What somebody waits for right now comes first, then gradients (they free buffers that backward
// needs), then updates.
constexpr int priority_fetch = 0;
constexpr int priority_gradient = 1;
constexpr int priority_update = 2;

inline void append(std::vector<TaskId>& to, const std::vector<TaskId>& from) {
  to.insert(to.end(), from.begin(), from.end());
}

}  // namespace tandem
