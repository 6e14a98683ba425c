#include "gpu_ops/cuda_device_reserve.hpp"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "core/cuda_memory.hpp"
#include "core/memory.hpp"
#include "gpu_ops/cuda_device_nvml.hpp"
#include "gpu_ops/runtime.hpp"

namespace tandem {
namespace {

using namespace literals;

// The driver loads a kernel's code when it is first launched (CUDA_MODULE_LOADING=LAZY), after the measurement, and
// allocations are rounded up. An allowance, not a measurement: run_gpu_checks counts what a whole run takes.
constexpr std::size_t loaded_later = 128_MiB;
// What is less is no new context: it was there already, of the program that tandem is a part of.
constexpr std::size_t smallest_context = 64_MiB;

/// Both counts are NVML's: it counts what the driver keeps for itself, some hundreds of MiB that CUDA's own count
/// leaves out.
std::optional<std::size_t> growth(std::optional<std::size_t> before, std::optional<std::size_t> after) {
  // Where it did not grow, others gave back meanwhile.
  if (!before || !after || *after < *before + smallest_context) return std::nullopt;
  return *after - *before;
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
  static std::map<int, ContextMemory> measured;
  const std::lock_guard lock(mutex);
  if (const auto known = measured.find(ordinal); known != measured.end()) {
    make();
    return known->second;
  }
  const std::unique_ptr<Nvml> nvml = Nvml::open(pci_bus);
  const auto used = [&] { return nvml ? nvml->used_bytes() : std::nullopt; };
  const std::optional<std::size_t> before = used();
  make();
  const std::optional<std::size_t> grown = growth(before, used());
  if (!grown) return assume();
  return measured.emplace(ordinal, ContextMemory{.taken = *grown, .later = loaded_later}).first->second;
}

}  // namespace tandem
