#include "offload/execution/task_runner.hpp"

#include <algorithm>
#include <cstring>

#include "core/base/error.hpp"
#include "core/numerics/fp8_scale.hpp"
#include "core/ops/ops.hpp"
#include "core/ops/update_kernels.hpp"
#include "scheduler/plan/link_codes.hpp"

namespace tandem {
namespace {

/// Copies the arrays of state: copy(to, from, bytes) for each.
template <class Copy>
void copy_state(const StateArrays& to, const StateArrays& from, std::int64_t count, StateFormat format, Copy copy) {
  copy(to.master, from.master, master_bytes(format, count));
  copy(to.m, from.m, m_bytes(format, count));
  copy(to.v, from.v, v_bytes(format, count));
}

}  // namespace

TaskRunner::TaskRunner(Device& device, const ParameterLayout& layout, const Plan& plan, const Storage& storage,
                       Group* group)
    : device_(device),
      layout_(layout),
      plan_(plan),
      storage_(storage),
      group_(group),
      coefficients_(layout),
      speculation_(device.host_kernels(), layout, plan, storage) {
  std::int64_t elements = 0;
  for (const Layer& layer : layout.layers()) {
    first_state_.push_back(elements);
    elements += layer.state_elements;
  }
  if (plan.rank.count == 1) return;
  for (const Layer& layer : layout.layers()) {
    parts_.push_back({weight_parts(layer, plan.rank.count), gradient_parts(layer, plan.rank.count)});
  }
}

void TaskRunner::to_device(void* to, const void* from, std::size_t bytes, StreamView stream) {
  device_.copy(to, from, bytes, CopyKind::host_to_device, stream);
  bytes_to_device_ += bytes;
  dram_bytes_ += bytes;
}

void TaskRunner::to_host(void* to, const void* from, std::size_t bytes, StreamView stream) {
  device_.copy(to, from, bytes, CopyKind::device_to_host, stream);
  bytes_to_host_ += bytes;
  dram_bytes_ += bytes;
}

void TaskRunner::issue(const Task& task, StreamView stream) {
  switch (task.kind) {
    case TaskKind::fetch_weights:
      return fetch_weights(task, stream);
    case TaskKind::decode_weights:
      return decode_weights(task, stream);
    case TaskKind::gather_weights:
      return gather_weights(task, stream);
    case TaskKind::all_to_all_gradient:
      return all_to_all_gradient(task, stream);
    case TaskKind::round_gradient:
      return round_gradient(task, stream);
    case TaskKind::sum_gradient:
      return sum_gradient(task, stream);
    case TaskKind::keep_gradient:
      return keep_gradient(task, stream);
    case TaskKind::flush_gradient:
      return flush_gradient(task, stream);
    case TaskKind::norm_gradient:
      return norm_of(caller_gradient(task), task, stream);
    case TaskKind::finish_gradient:
      return finish_on_device(task, stream);
    case TaskKind::fetch_norm:
      return fetch_norm(task, stream);
    case TaskKind::load_state:
      return load_state(task, stream);
    case TaskKind::update_streamed:
    case TaskKind::update_resident:
      return update_on_device(task, stream);
    case TaskKind::store_state:
      return store_state(task, stream);
    case TaskKind::store_weights:
      return store_weights(task, stream);
    case TaskKind::push_weights:
      return push_weights(task, stream);
    case TaskKind::layer_use:
    case TaskKind::commit:
    case TaskKind::accumulate_gradient:
    case TaskKind::encode_weights:
    case TaskKind::speculate:
    case TaskKind::retract:
    case TaskKind::update_cpu:
    case TaskKind::read_state:
    case TaskKind::write_state:
    case TaskKind::save_state:
      break;
  }
  throw MisuseError("task is not one of a device lane", std::string(name_of(task.kind)));
}

void TaskRunner::run(const Task& task) {
  if (task.kind == TaskKind::accumulate_gradient) return accumulate_gradient(task);
  if (task.kind == TaskKind::finish_gradient) return finish_on_cpu(task);
  if (task.kind == TaskKind::update_cpu) return update_on_cpu(task);
  if (task.kind == TaskKind::encode_weights) return encode_weights(task);
  if (task.kind == TaskKind::speculate) return speculation_.speculate(task, piece_on_cpu(task));
  if (task.kind == TaskKind::retract) return speculation_.retract(task, piece_on_cpu(task));
  if (task.kind == TaskKind::read_state || task.kind == TaskKind::write_state) return move_state(task);
  throw MisuseError("task is not one of a worker's lane", std::string(name_of(task.kind)));
}

void TaskRunner::fetch_weights(const Task& task, StreamView stream) {
  std::byte* const buffer = storage_.weight_buffer(task.buffer);
  const Layer& layer = layer_at(layout_, task.layer);
  const auto fetch = [&](std::int64_t begin, std::int64_t count) {
    const std::size_t at = layer.weight_offset(begin);
    to_device(buffer + at, storage_.host_weight(task.layer, begin), layer.weight_offset(begin + count) - at, stream);
  };
  if (task.code_buffer < 0) return storage_.slice(task.layer).for_runs(fetch);
  to_device(storage_.fetched_codes(task.code_buffer), storage_.layer_codes(task.layer), code_bytes(layer), stream);
  for_uncoded(layer, fetch);
}

/// Makes the codes of a layer's fp8_factors. The scale of the codes before is the guess at the new one.
void TaskRunner::encode_weights(const Task& task) {
  std::byte* const stored = storage_.layer_codes(task.layer);
  for_factors(layer_at(layout_, task.layer), [&](const Parameter& p, std::size_t codes, std::size_t scales_at) {
    float* const scales = reinterpret_cast<float*>(stored + scales_at);
    const int guess = numerics::fp8_exponent_of(scales[0]);
    const int exponent = device_.host_kernels().fp8_codes(
        reinterpret_cast<const bf16*>(storage_.host_weight(task.layer, p.offset)), p.count, guess,
        reinterpret_cast<std::uint8_t*>(stored + codes), plan_.update_threads);
    std::fill_n(scales, factor_scales(p), numerics::fp8_power(exponent));
    const int passes = exponent == guess ? 1 : 2;
    dram_bytes_ += static_cast<std::uint64_t>(passes * p.count * code_moves);
  });
}

void TaskRunner::decode_weights(const Task& task, StreamView stream) {
  const Layer& layer = layer_at(layout_, task.layer);
  const std::byte* const stored = storage_.fetched_codes(task.code_buffer);
  std::byte* const weights = storage_.weight_buffer(task.buffer);
  for_factors(layer, [&](const Parameter& p, std::size_t codes, std::size_t scales) {
    const CodedWeight from{WeightCode::fp8, stored + codes, reinterpret_cast<const float*>(stored + scales)};
    device_.ops().decode(from, {weights + layer.weight_offset(p.offset), DType::bf16, p.shape}, stream);
  });
}

void TaskRunner::gather_weights(const Task& task, StreamView stream) {
  std::byte* const weights =
      task.buffer < 0 ? storage_.resident_weights(task.layer) : storage_.weight_buffer(task.buffer);
  for (const std::vector<ByteRange>& parts : parts_[task.layer].weights) {
    const bool any = std::ranges::any_of(parts, [](const ByteRange& part) { return part.size() > 0; });
    if (any) group_->all_gather(weights, parts, stream);
  }
  bytes_from_peers_ += task.bytes;
}

void TaskRunner::all_to_all_gradient(const Task& task, StreamView stream) {
  group_->all_to_all(storage_.gradient_buffer(task.buffer), parts_[task.layer].gradient,
                     storage_.receive_buffer(task.receive_buffer), stream);
  bytes_from_peers_ += task.bytes;
}

/// A piece as the caller of some rank has filled it: sums in fp32, or bf16.
const void* TaskRunner::caller_gradient(const Task& task) const {
  const std::size_t offset = layer_at(layout_, task.layer).gradient_offset(task.begin);
  if (task.receive_buffer < 0) return storage_.gradient_buffer(task.buffer) + offset;
  const Rank own = plan_.rank;
  const ByteRange& part = parts_[task.layer].gradient[static_cast<std::size_t>(own.index)];
  // Parts of the ranks below this one come first, then of those above it.
  const auto place = static_cast<std::size_t>(task.from_rank < own.index ? task.from_rank : task.from_rank - 1);
  return storage_.receive_buffer(task.receive_buffer) + place * part.size() + (offset - part.begin);
}

/// Adds a piece to those of the micro-batches before; the last one leaves the sum, rounded, in `result`, where those
/// that the caller has summed up in fp32 are rounded before they are added. Nothing is rounded where the final gradient
/// is fp32.
void TaskRunner::add_gradient(const Task& task, float* sum, std::byte* result, StreamView stream) {
  Ops& ops = device_.ops();
  const void* const filled = caller_gradient(task);
  if (task.in_fp32) {
    ops.accumulate(sum, static_cast<const float*>(filled), task.first_micro, task.count(), stream);
    if (task.last_micro) finish_sum(task, sum, result, stream);
    return;
  }
  bf16* const rounded = reinterpret_cast<bf16*>(result);
  if (!task.in_bf16) ops.round(static_cast<const float*>(filled), rounded, task.count(), stream);
  const bf16* const gradient = task.in_bf16 ? static_cast<const bf16*>(filled) : rounded;
  ops.accumulate(sum, gradient, task.first_micro, task.count(), stream);
  if (task.last_micro) ops.round(sum, rounded, task.count(), stream);
}

void TaskRunner::round_gradient(const Task& task, StreamView stream) {
  std::byte* const rounded = storage_.staging(task.staging);
  device_.ops().round(static_cast<const float*>(caller_gradient(task)), reinterpret_cast<bf16*>(rounded), task.count(),
                      stream);
  if (plan_.norms_on_device()) norm_of(rounded, task, stream);
}

void TaskRunner::sum_gradient(const Task& task, StreamView stream) {
  std::byte* const rounded = task.staging < 0 ? nullptr : storage_.staging(task.staging);
  const std::int64_t at = task.begin - storage_.slice(task.layer).trained.begin;
  add_gradient(task, storage_.sum_buffer(task.sum) + at, rounded, stream);
  if (task.last_micro) norm_of(rounded, task, stream);
}

/// Norm blocks of a range of a final gradient that leaves the device.
void TaskRunner::norm_of(const void* gradient, const Task& task, StreamView stream) {
  norm_blocks(gradient, task, storage_.gradient_norm(task.buffer) + task.begin / layout_quantum, stream);
}

/// Norm blocks of a piece of a final gradient, of its type.
void TaskRunner::norm_blocks(const void* gradient, const Task& task, double* partial, StreamView stream) {
  if (task.in_fp32) {
    device_.ops().norm_blocks(static_cast<const float*>(gradient), task.count(), partial, stream);
  } else {
    device_.ops().norm_blocks(static_cast<const bf16*>(gradient), task.count(), partial, stream);
  }
}

/// A complete sum as a final gradient.
void TaskRunner::finish_sum(const Task& task, const float* sum, std::byte* gradient, StreamView stream) {
  if (task.in_fp32) {
    device_.copy(gradient, sum, gradient_bytes(format_of(task), task.count()), CopyKind::device_to_device, stream);
  } else {
    device_.ops().round(sum, reinterpret_cast<bf16*>(gradient), task.count(), stream);
  }
}

void TaskRunner::keep_gradient(const Task& task, StreamView stream) {
  const SubgroupMemory& memory = storage_.subgroup(task.subgroup);
  const std::int64_t at = within_subgroup(task);
  std::byte* const gradient = final_gradient(task);
  double* const norms = memory.device_norm + at / layout_quantum;
  const bool single = task.first_micro && task.last_micro;
  if (single && (task.in_bf16 || task.in_fp32)) {
    // Read where the caller has written it: the copy bypasses the host's caches.
    norm_blocks(caller_gradient(task), task, norms, stream);
    device_.copy(gradient, caller_gradient(task), gradient_bytes(format_of(task), task.count()),
                 CopyKind::device_to_device, stream);
    return;
  }
  if (single) {
    device_.ops().round(static_cast<const float*>(caller_gradient(task)), reinterpret_cast<bf16*>(gradient),
                        task.count(), stream);
  } else {
    add_gradient(task, memory.sum + at, gradient, stream);
  }
  if (task.last_micro) norm_blocks(gradient, task, norms, stream);
}

void TaskRunner::accumulate_gradient(const Task& task) {
  const SubgroupMemory& memory = storage_.subgroup(task.subgroup);
  const std::int64_t at = within_subgroup(task);
  std::byte* const gradient = final_gradient(task);
  UpdateKernels& kernels = device_.host_kernels();
  const bool single = task.first_micro && task.last_micro;
  if (!single && task.in_fp32) {
    kernels.accumulate(memory.sum + at, reinterpret_cast<const float*>(gradient), task.first_micro, task.count());
  } else if (!single) {
    kernels.accumulate(memory.sum + at, reinterpret_cast<const bf16*>(gradient), task.first_micro, task.count());
  }
  if (!single && task.last_micro) finish_sum_on_cpu(task);
  if (task.last_micro) norm_blocks_on_cpu(task);
  dram_bytes_ += accumulation_bytes(task);
}

void TaskRunner::finish_on_cpu(const Task& task) {
  if (task.first_micro) {
    std::fill_n(final_gradient(task), gradient_bytes(format_of(task), task.count()), std::byte{0});
  } else {
    finish_sum_on_cpu(task);
  }
  norm_blocks_on_cpu(task);
  dram_bytes_ += accumulation_bytes(task);
}

void TaskRunner::finish_on_device(const Task& task, StreamView stream) {
  const SubgroupMemory& memory = storage_.subgroup(task.subgroup);
  const std::int64_t at = within_subgroup(task);
  std::byte* const gradient = final_gradient(task);
  if (task.first_micro) {
    device_.fill_zero(gradient, gradient_bytes(format_of(task), task.count()), stream);
  } else {
    finish_sum(task, memory.sum + at, gradient, stream);
  }
  norm_blocks(gradient, task, memory.device_norm + at / layout_quantum, stream);
}

void TaskRunner::finish_sum_on_cpu(const Task& task) {
  const float* const sum = storage_.subgroup(task.subgroup).sum + within_subgroup(task);
  std::byte* const gradient = final_gradient(task);
  if (task.in_fp32) {
    std::memcpy(gradient, sum, gradient_bytes(format_of(task), task.count()));
  } else {
    device_.host_kernels().round(sum, reinterpret_cast<bf16*>(gradient), task.count());
  }
}

void TaskRunner::norm_blocks_on_cpu(const Task& task) {
  double* const partial = storage_.subgroup(task.subgroup).host_norm + within_subgroup(task) / layout_quantum;
  const std::byte* const gradient = final_gradient(task);
  UpdateKernels& kernels = device_.host_kernels();
  if (task.in_fp32) {
    kernels.norm_blocks(reinterpret_cast<const float*>(gradient), task.count(), partial);
  } else {
    kernels.norm_blocks(reinterpret_cast<const bf16*>(gradient), task.count(), partial);
  }
}

void TaskRunner::flush_gradient(const Task& task, StreamView stream) {
  to_host(final_gradient(task), task.staging < 0 ? caller_gradient(task) : storage_.staging(task.staging),
          gradient_bytes(format_of(task), task.count()), stream);
}

void TaskRunner::fetch_norm(const Task& task, StreamView stream) {
  const SubgroupMemory& memory = storage_.subgroup(task.subgroup);
  const std::int64_t at = within_subgroup(task);
  const std::int64_t block = at / layout_quantum;
  const double* const made = subgroup_at(plan_, task.subgroup).gradient_on_device
                                 ? memory.device_norm + block
                                 : storage_.gradient_norm(task.buffer) + task.begin / layout_quantum;
  to_host(memory.host_norm + block, made, task.bytes, stream);
}

void TaskRunner::load_state(const Task& task, StreamView stream) {
  const Subgroup& group = subgroup_at(plan_, task.subgroup);
  const StateFormat format = format_of(task);
  if (task.buffer >= 0) {
    copy_state(storage_.state_buffer(task.buffer, task.subgroup, task.count()), state_of(task), task.count(), format,
               [&](void* to, const void* from, std::size_t bytes) { to_device(to, from, bytes, stream); });
    if (!group.gradient_on_device) {
      to_device(storage_.streamed_gradient(task.buffer), final_gradient(task), gradient_bytes(format, task.count()),
                stream);
    }
  }
  if (plan_.loads_weights(group)) {
    to_device(storage_.staging(task.staging), host_weights(task), weight_bytes(format, task.count()), stream);
  }
}

void TaskRunner::store_state(const Task& task, StreamView stream) {
  copy_state(state_of(task), storage_.state_buffer(task.buffer, task.subgroup, task.count()), task.count(),
             format_of(task), [&](void* to, const void* from, std::size_t bytes) { to_host(to, from, bytes, stream); });
}

void TaskRunner::store_weights(const Task& task, StreamView stream) {
  to_host(host_weights(task), storage_.staging(task.staging), weight_bytes(format_of(task), task.count()), stream);
}

void TaskRunner::push_weights(const Task& task, StreamView stream) {
  to_device(resident_weights(task), host_weights(task), weight_bytes(format_of(task), task.count()), stream);
}

/// Memory that a device update writes the new weights to: the resident layer, or staging on its way to the host.
std::byte* TaskRunner::updated_weights(const Task& task) const {
  return task.staging >= 0 ? storage_.staging(task.staging) : resident_weights(task);
}

/// The state of a task's elements outside the device's buffers: where the plan keeps it, or on its way from the file.
StateArrays TaskRunner::state_of(const Task& task) const {
  if (task.file_buffer >= 0) return storage_.file_buffer(task.file_buffer, task.subgroup, task.count());
  return storage_.subgroup(task.subgroup).state.from(within_subgroup(task), format_of(task));
}

/// Moves state between the file and a buffer on the host.
void TaskRunner::move_state(const Task& task) {
  const std::int64_t at = within_subgroup(task);
  if (task.kind == TaskKind::read_state) {
    storage_.read_file(task.subgroup, at, task.count(), task.file_buffer);
    bytes_from_file_ += task.bytes;
  } else {
    storage_.write_file(task.subgroup, at, task.count(), task.file_buffer);
    bytes_to_file_ += task.bytes;
  }
  dram_bytes_ += task.bytes;
}

/// Operands of a task's update.
AdamPiece TaskRunner::piece_of(const Task& task, const StateArrays& state, const std::byte* gradient,
                               std::byte* weights) const {
  AdamPiece piece;
  piece.state = state;
  piece.count = task.count();
  piece.format = format_of(task);
  if (has_fp32_weights(piece.format)) {
    piece.fp32_gradient = reinterpret_cast<const float*>(gradient);
    piece.fp32_weight = reinterpret_cast<float*>(weights);
  } else {
    piece.gradient = reinterpret_cast<const bf16*>(gradient);
    piece.weight = reinterpret_cast<bf16*>(weights);
  }
  piece.index = static_cast<std::uint64_t>(first_state_[task.layer] + task.begin);
  return piece;
}

void TaskRunner::update_on_device(const Task& task, StreamView stream) {
  const bool streamed = task.kind == TaskKind::update_streamed;
  const bool kept = subgroup_at(plan_, task.subgroup).gradient_on_device;
  const StateArrays state = streamed ? storage_.state_buffer(task.buffer, task.subgroup, task.count()) : state_of(task);
  const std::byte* const gradient = streamed && !kept ? storage_.streamed_gradient(task.buffer) : final_gradient(task);
  const AdamPiece piece = piece_of(task, state, gradient, updated_weights(task));
  coefficients_.for_segments(
      task, piece, [&](const AdamPiece& part, const AdamCoefficients& c) { device_.ops().adamw(part, c, stream); });
  (streamed ? updated_streamed_ : updated_resident_) +=
      static_cast<std::uint64_t>(coefficients_.updated_parameters(task));
}

AdamPiece TaskRunner::piece_on_cpu(const Task& task) const {
  return piece_of(task, state_of(task), final_gradient(task), host_weights(task));
}

void TaskRunner::update_on_cpu(const Task& task) {
  const AdamPiece piece = piece_on_cpu(task);
  UpdateKernels& kernels = device_.host_kernels();
  if (!speculation_.settle(task, piece, coefficients_)) {
    coefficients_.for_segments(task, piece, [&](const AdamPiece& part, const AdamCoefficients& c) {
      kernels.adamw(part, c, plan_.update_threads);
    });
  }
  dram_bytes_ += update_bytes(format_of(task), task.count());
  updated_cpu_ += static_cast<std::uint64_t>(coefficients_.updated_parameters(task));
}

EngineCounters TaskRunner::counters() const {
  EngineCounters counters;
  counters.bytes_host_to_device = bytes_to_device_;
  counters.bytes_device_to_host = bytes_to_host_;
  counters.bytes_from_peers = bytes_from_peers_;
  counters.dram_bytes = dram_bytes_;
  counters.bytes_from_file = bytes_from_file_;
  counters.bytes_to_file = bytes_to_file_;
  counters.parameters_updated_cpu = updated_cpu_;
  counters.parameters_updated_streamed = updated_streamed_;
  counters.parameters_updated_resident = updated_resident_;
  counters.parameters_speculated = speculation_.updated();
  counters.parameters_taken_back = speculation_.taken_back();
  return counters;
}

}  // namespace tandem
