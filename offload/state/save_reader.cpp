#include "offload/state/save_reader.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "core/base/error.hpp"
#include "offload/state/state_of_ranks.hpp"

namespace tandem {

SaveReader::SaveReader(Executor& executor, const StateAccess& access, const ParameterLayout& layout, Group* group,
                       std::vector<Task> tasks)
    : executor_(executor), access_(access), layout_(layout), group_(group), tasks_(std::move(tasks)) {}

SaveReader::~SaveReader() {
  if (begun_) executor_.finish_save_task(tasks_[next_].id);
  if (!tasks_.empty()) executor_.drop_save_tasks(tasks_.back().id + 1);
}

/// The task to which an element of the layer's flat arrays must belong.
const Task& SaveReader::expected(const Parameter& p, StateArray array, std::int64_t element) const {
  if (next_ < tasks_.size()) {
    const Task& task = tasks_[next_];
    const bool same = task.layer == layer_of(p) && task.array == array;
    if (same && element == (begun_ ? element_ : task.begin)) return task;
  }
  throw MisuseError(fmt::format("a save reads element {} of {}", element - p.offset, p.full_name),
                    "it is not what comes next",
                    "read all owned parameters in model order, frozen ones or not, each array from its beginning");
}

void SaveReader::read(const Parameter& p, StateArray array, std::int64_t first, std::span<float> values) {
  read_of_ranks(group_, Channel::save, Readers::rank_zero, layout_, p, first, values,
                [&](std::int64_t at, std::span<float> own) { read_own(p, array, at, own); });
}

/// Ends tasks of frozen parameters that come before the trained one that is asked for: of what never changes, nothing
/// waits to be read.
void SaveReader::pass_over_frozen(const Parameter& p) {
  if (begun_ || !p.options.trainable) return;
  const auto is_frozen = [&](const Task& task) { return task.begin >= layer_at(layout_, task.layer).state_elements; };
  while (next_ < tasks_.size() && is_frozen(tasks_[next_])) {
    executor_.begin_save_task(tasks_[next_].id);
    executor_.finish_save_task(tasks_[next_].id);
    ++next_;
  }
}

void SaveReader::read_own(const Parameter& p, StateArray array, std::int64_t first, std::span<float> values) {
  if (!values.empty()) pass_over_frozen(p);
  while (!values.empty()) {
    const Task& task = expected(p, array, p.offset + first);
    if (!begun_) {
      executor_.begin_save_task(task.id);
      element_ = task.begin;
      begun_ = true;
    }
    const std::int64_t count = std::min(static_cast<std::int64_t>(values.size()), task.end - element_);
    access_.read(p, array, first, values.first(static_cast<std::size_t>(count)));
    values = values.subspan(static_cast<std::size_t>(count));
    first += count;
    element_ += count;
    if (element_ < task.end) {
      executor_.note_save_progress();
      continue;
    }
    executor_.finish_save_task(task.id);
    begun_ = false;
    ++next_;
  }
}

}  // namespace tandem
