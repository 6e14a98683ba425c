#include "scheduler/tasks/task.hpp"

#include <fmt/format.h>

namespace tandem {

std::string_view name_of(Lane lane) noexcept {
  switch (lane) {
    case Lane::caller:
      return "caller";
    case Lane::host_to_device:
      return "host to device";
    case Lane::device_to_host:
      return "device to host";
    case Lane::device:
      return "device";
    case Lane::cpu:
      return "cpu";
    case Lane::disk:
      return "disk";
    case Lane::file_read:
      return "file read";
    case Lane::file_write:
      return "file write";
    case Lane::peers:
      return "peers";
  }
  return "unknown";
}

std::string_view name_of(TaskKind kind) noexcept {
  switch (kind) {
    case TaskKind::layer_use:
      return "layer_use";
    case TaskKind::commit:
      return "commit";
    case TaskKind::fetch_weights:
      return "fetch_weights";
    case TaskKind::encode_weights:
      return "encode_weights";
    case TaskKind::decode_weights:
      return "decode_weights";
    case TaskKind::gather_weights:
      return "gather_weights";
    case TaskKind::all_to_all_gradient:
      return "all_to_all_gradient";
    case TaskKind::round_gradient:
      return "round_gradient";
    case TaskKind::sum_gradient:
      return "sum_gradient";
    case TaskKind::keep_gradient:
      return "keep_gradient";
    case TaskKind::flush_gradient:
      return "flush_gradient";
    case TaskKind::accumulate_gradient:
      return "accumulate_gradient";
    case TaskKind::finish_gradient:
      return "finish_gradient";
    case TaskKind::norm_gradient:
      return "norm_gradient";
    case TaskKind::fetch_norm:
      return "fetch_norm";
    case TaskKind::load_state:
      return "load_state";
    case TaskKind::update_streamed:
      return "update_streamed";
    case TaskKind::store_state:
      return "store_state";
    case TaskKind::update_resident:
      return "update_resident";
    case TaskKind::store_weights:
      return "store_weights";
    case TaskKind::speculate:
      return "speculate";
    case TaskKind::retract:
      return "retract";
    case TaskKind::update_cpu:
      return "update_cpu";
    case TaskKind::push_weights:
      return "push_weights";
    case TaskKind::read_state:
      return "read_state";
    case TaskKind::write_state:
      return "write_state";
    case TaskKind::save_state:
      return "save_state";
  }
  return "unknown";
}

std::string Task::text(std::string_view layer_name) const {
  if (count() == 0) return fmt::format("{} {}", name_of(kind), layer_name);
  return fmt::format("{} {} [{}, {})", name_of(kind), layer_name, begin, end);
}

std::uint64_t accumulation_bytes(const Task& task) noexcept {
  if (task.kind == TaskKind::finish_gradient) return static_cast<std::uint64_t>(task.count()) * finish_bytes;
  const bool alone = task.first_micro && task.last_micro;
  return static_cast<std::uint64_t>(task.count()) *
         static_cast<std::uint64_t>((alone ? 0 : sum_bytes) + (task.last_micro ? 2 : 0));
}

void TaskList::clear() noexcept {
  tasks_.clear();
  dependencies_.clear();
}

bool takes_subgroup_whole(const Task& task) noexcept {
  switch (task.kind) {
    case TaskKind::keep_gradient:
    case TaskKind::norm_gradient:
    case TaskKind::fetch_norm:
    case TaskKind::speculate:
    case TaskKind::retract:
      return true;
    case TaskKind::update_cpu:
    case TaskKind::push_weights:
      return task.file_buffer < 0;
    case TaskKind::update_resident:
      return task.staging < 0;
    case TaskKind::finish_gradient:
      return task.lane == Lane::device;
    default:
      return false;
  }
}

}  // namespace tandem
