#include "train/setup/host_rows.hpp"

#include <algorithm>

#include "comm/gloo_transport.hpp"
#include "core/base/direct_buffer.hpp"
#include "io/atomic_file.hpp"
#include "offload/engine/state_io.hpp"
#include "offload/state/state_access.hpp"
#include "offload/storage/state_file.hpp"
#include "scheduler/plan/plan_builder.hpp"
#include "scheduler/plan/rank_slice.hpp"
#include "train/setup/host_batch.hpp"

namespace tandem {
namespace {

/// Bytes that libraries take once a run goes: kernels that oneDNN compiles (3.4 MB of it), stacks, and for each thread
/// the buffers that a matrix product packs (a MiB at a time) and its heap keeps. It cannot be known before; of one to
/// four threads and 64 to 1,024 rows, 3 to 16 MB were seen, the most with two threads. Beside a GPU it is the memory
/// that driver, cuBLASLt and cuDNN keep for kernels that they load and compile when these are first asked for: 146 MiB
/// were seen without cuDNN and 155 with it.
std::size_t libraries_in_use(const RunMachine& machine) noexcept {
  constexpr std::size_t beside_a_gpu = 192;
  const std::size_t mib =
      machine.device_kind == "host" ? 8 + 6 * static_cast<std::size_t>(machine.device_threads) : beside_a_gpu;
  return mib << 20;
}

/// Bytes that the engine keeps about a subgroup: itself, who used it last, its tasks of a step and what they wait for.
/// Lists grow by doubling; 0.9 to 1.9 KB were seen, most where it is streamed.
constexpr std::size_t bytes_of_subgroup = 2048;

/// Bytes of `n` values that all threads read in parts, a value each.
std::size_t in_parts(std::size_t n, std::size_t threads) noexcept {
  return threads * std::min(n, static_cast<std::size_t>(StateAccess::part_elements));
}

/// Weights, and beside them residuals or moments of 16 bits each, of the parameter that takes most.
std::size_t conversion_bytes(const RunPlan& run, std::size_t threads) {
  constexpr std::size_t piece = std::size_t{1} << 20;  // values that the engine hands out at a time
  std::size_t most = 0;
  for (const Parameter* p : run.layout.owned_parameters()) {
    const std::size_t width = run.options.state != StateFormat::fp32 ? 4 : p->options.trainable ? 0 : 2;
    const auto count = static_cast<std::size_t>(p->count);
    most = std::max(most, std::max(std::min(count, piece), in_parts(count, threads)) * width);
  }
  return most;
}

}  // namespace

std::size_t program_bytes(std::string_view device_kind, std::size_t measured) noexcept {
  const std::size_t assumed = std::size_t{device_kind == "host" ? 16U : 64U} << 20;
  return std::max(assumed, measured);
}

HostRows host_rows(const RunPlan& run, const RunPurpose& purpose, const RunMachine& machine) {
  HostRows rows;
  rows.program = part_of_rank(machine.program_bytes, run.options.rank);
  rows.libraries = libraries_in_use(machine);
  rows.batches = host_batch_bytes(run.shape, run.batch_slots);
  rows.reference = run.reference ? run.reference->bytes : 0;
  if (machine.processes > 1 && machine.device_kind == "host") rows.staging = gloo_staging_bytes;
  if (!purpose.training) return rows;
  const auto threads = static_cast<std::size_t>(machine.update_threads);
  rows.subgroups = static_cast<std::size_t>(subgroup_count(run.layout, run.options)) * bytes_of_subgroup;
  rows.digest = in_parts(largest_parameter(run.layout), threads) * sizeof(float);
  rows.conversion = conversion_bytes(run, threads);
  // For each thread that reads parts for a digest; one for a save's larger ones.
  if (run.options.state_folder) {
    rows.file = rows.digest + threads * 2 * direct_block_bytes + StateFile::buffer_bytes;
  }
  // Loading takes pieces of the same size, at another time.
  if (!purpose.saves && !purpose.resumes) return rows;
  rows.checkpoint = save_buffer_values(run.layout) * sizeof(float);
  if (way_of_file(StateCopy::bytes(run.layout, optimizer_of(run.options.state), run.saved_state())) == FileWay::direct)
    rows.writer = large_file_buffers;
  return rows;
}

void HostRows::add_to(MemoryPlan& memory) const {
  memory.add("program and libraries", "run", Place::pageable, program);
  memory.add("libraries in use", "run", Place::pageable, libraries);
  memory.add("lists of subgroups", "run", Place::pageable, subgroups);
  memory.add("batches", "run", Place::pinned, batches);
  memory.add("staging between ranks", "run", Place::pinned, staging);
  memory.add("reference of DPO", "run", Place::pageable, reference);
  memory.add("digest buffer", "save", Place::pageable, digest);
  memory.add("state conversion", "save", Place::pageable, conversion);
  memory.add("state file buffers", "save", Place::pageable, file);
  memory.add("checkpoint buffer", "save", Place::pageable, checkpoint);
  memory.add("checkpoint writer", "save", Place::pageable, writer);
}

}  // namespace tandem
