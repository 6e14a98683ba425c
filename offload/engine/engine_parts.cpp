#include "offload/engine/engine_parts.hpp"

#include <array>
#include <span>

#include "core/memory/memory.hpp"
#include "core/ops/undo_record.hpp"
#include "offload/engine/plan_agreement.hpp"

namespace tandem {
namespace {

/// Lanes of no stream that a plan has tasks for.
std::span<const Lane> worker_lanes(const Plan& plan) noexcept {
  static constexpr std::array lanes{Lane::cpu, Lane::file_read, Lane::file_write};
  return std::span(lanes).first(plan.file_buffers > 0 ? lanes.size() : 1);
}

/// Bytes at the end of the plan's host memory that no copy to or from the device touches: undo records, and what is
/// spare.
std::size_t bytes_without_copies(const Plan& plan) noexcept {
  std::size_t bytes = plan.spare_host_memory;
  for (const Subgroup& s : plan.subgroups) {
    if (s.speculates) bytes += align_up(undo_bytes(plan.format_of(s), s.count()));
  }
  return bytes;
}

}  // namespace

EngineParts::EngineParts(Device& of_device, const ParameterLayout& of_layout, const OffloadOptions& of_options,
                         const Plan& of_plan, Trace* trace, Group* of_group)
    : device(of_device),
      group(of_group),
      layout(of_layout),
      options(of_options),
      plan(checked_plan(of_plan, layout, options, group)),
      storage(device, layout, plan, options.state_folder.value_or(std::filesystem::path()), options.watchdog_seconds),
      access(device, layout, plan, storage, options.watchdog_seconds),
      lowering(std::in_place, layout, plan),
      runner(device, layout, plan, storage, group),
      stalls(device, options.watchdog_seconds, 2 * layout.layers().size()),
      executor({.device = device,
                .layout = layout,
                .runner = runner,
                .updates = updates,
                .trace = trace,
                .watchdog_seconds = options.watchdog_seconds,
                .overlap = options.overlap,
                .copies = storage.pageable_bytes() > bytes_without_copies(plan) ? Copies::block : Copies::async,
                .worker_lanes = worker_lanes(plan),
                .group = group}) {
  plan.memory.unpin(storage.pageable_bytes());
}

void EngineParts::submit() {
  if (!tasks.empty()) executor.submit(tasks);
}

void EngineParts::prefetch() {
  if (options.overlap) lowering->prefetch(tasks);
}

}  // namespace tandem
