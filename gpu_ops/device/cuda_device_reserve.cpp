#include "gpu_ops/device/cuda_device_reserve.hpp"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "core/device/cuda_memory.hpp"
#include "core/memory/memory.hpp"
#include "gpu_ops/device/cuda_device_nvml.hpp"
#include "gpu_ops/device/runtime.hpp"

namespace tandem {
namespace {

using namespace literals;

// The driver loads a kernel's code when it is first launched (CUDA_MODULE_LOADING=LAZY), after the measurement, and
// allocations are rounded up. An allowance, not a measurement: run_gpu_checks counts what a whole run takes.
constexpr std::size_t loaded_later = 128_MiB;
// Smallest growth that counts as a new context. A smaller one means that the program which uses tandem had made it
// before.
constexpr std::size_t smallest_context = 64_MiB;
constexpr std::size_t most_unattributed = 64_MiB;

/// Memory in use as NVML counts it, with some hundreds of MiB that the driver keeps for itself and that CUDA's own
/// count leaves out.
struct Usage {
  std::optional<std::size_t> own;  ///< bytes of this process; empty also before it has a context
  std::optional<std::size_t> all;  ///< bytes of all processes
};

Usage usage_by(const Nvml* nvml) {
  if (nvml == nullptr) return {};
  return {.own = nvml->own_bytes(), .all = nvml->used_bytes()};
}

std::size_t growth(std::size_t before, std::size_t after) { return after > before ? after - before : 0; }

/// Empty where it did not grow by a context. Where NVML counts by process, what others take or give back meanwhile, as
/// a desktop does, does not count but for as much as the driver may keep for this process without saying so.
std::optional<std::size_t> growth(const Usage& before, const Usage& after) {
  if (!before.all || !after.all) return std::nullopt;
  std::size_t grown = growth(*before.all, *after.all);
  if (after.own) {
    const std::size_t own = growth(before.own.value_or(0), *after.own);
    grown = own < smallest_context ? 0 : std::clamp(grown, own, own + most_unattributed);
  }
  // Where all did not grow, others gave back meanwhile.
  return grown < smallest_context ? std::nullopt : std::optional(grown);
}

/// No more is taken than is in use.
ContextMemory assume() {
  const gpu::runtime::FreeMemory memory = gpu::runtime::free_memory();
  const std::size_t used = memory.total - memory.free;
  constexpr std::size_t rounding = 32_MiB;
  const std::size_t taken = std::min(assumed_cuda_context - loaded_later, used);
  return {.taken = taken, .later = std::min(assumed_cuda_context, used + rounding) - taken};
}

}  // namespace

ContextMemory make_and_measure_context(int ordinal, const std::string& pci_bus, const std::function<void()>& make) {
  static std::mutex mutex;
  static std::map<int, ContextMemory> found;
  const std::lock_guard lock(mutex);
  if (const auto known = found.find(ordinal); known != found.end()) {
    make();
    return known->second;
  }
  const std::unique_ptr<Nvml> nvml = Nvml::open(pci_bus);
  const Usage before = usage_by(nvml.get());
  make();
  const std::optional<std::size_t> grown = growth(before, usage_by(nvml.get()));
  const ContextMemory memory = grown ? ContextMemory{.taken = *grown, .later = loaded_later} : assume();
  return found.emplace(ordinal, memory).first->second;
}

}  // namespace tandem
