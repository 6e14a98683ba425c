#include "gpu_ops/device/cuda_device_nvml.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <vector>

#include "core/memory/memory.hpp"
#include "gpu_ops/device/shared_library.hpp"

namespace tandem {
namespace {

// The few declarations of the library's stable interface that are called here: its header is not part of
// every toolkit installation.
using NvmlDevice = void*;
constexpr int success = 0;
constexpr int insufficient_size = 7;

struct Memory {
  unsigned long long total;
  unsigned long long free;
  unsigned long long used;
};

struct Process {
  unsigned int pid;
  unsigned long long used;
  unsigned int gpu_instance;
  unsigned int compute_instance;
};
constexpr unsigned long long not_available = ~0ULL;

bool is_own(const Process& process) { return process.pid == static_cast<unsigned int>(::getpid()); }
bool is_counted(const Process& process) { return process.used != not_available; }

}  // namespace

struct Nvml::Functions {
  int (*init)() = nullptr;
  int (*shutdown)() = nullptr;
  int (*device_by_bus)(const char*, NvmlDevice*) = nullptr;
  int (*memory)(NvmlDevice, Memory*) = nullptr;
  int (*processes)(NvmlDevice, unsigned int*, Process*) = nullptr;
  int (*process_name)(unsigned int, char*, unsigned int) = nullptr;
  NvmlDevice device = nullptr;

  bool load() {
    const auto library = gpu::SharedLibrary::find({"libnvidia-ml.so.1"});
    if (!library) return false;
    init = library->function<int()>("nvmlInit_v2");
    shutdown = library->function<int()>("nvmlShutdown");
    device_by_bus = library->function<int(const char*, NvmlDevice*)>("nvmlDeviceGetHandleByPciBusId_v2");
    memory = library->function<int(NvmlDevice, Memory*)>("nvmlDeviceGetMemoryInfo");
    processes = library->function<int(NvmlDevice, unsigned int*, Process*)>("nvmlDeviceGetComputeRunningProcesses_v3");
    process_name = library->function<int(unsigned int, char*, unsigned int)>("nvmlSystemGetProcessName");
    return init && shutdown && device_by_bus && memory && processes && process_name;
  }

  std::vector<Process> running() const {
    std::vector<Process> list;
    unsigned int count = 0;
    int code = processes(device, &count, nullptr);
    // Processes come and go between the two calls: a few more than were counted may be there.
    for (int attempt = 0; code == insufficient_size && attempt < 3; ++attempt) {
      count += 8;
      list.resize(count);
      code = processes(device, &count, list.data());
    }
    list.resize(code == success ? std::min<std::size_t>(count, list.size()) : 0);
    return list;
  }

  std::string name_of(unsigned int pid) const {
    std::array<char, 256> text{};
    if (process_name(pid, text.data(), static_cast<unsigned int>(text.size() - 1)) != success) return {};
    const std::string path = text.data();
    return path.substr(path.find_last_of('/') + 1);
  }
};

Nvml::Nvml() : functions_(std::make_unique<Functions>()) {}

Nvml::~Nvml() { functions_->shutdown(); }

std::unique_ptr<Nvml> Nvml::open(const std::string& pci_bus) {
  auto functions = std::make_unique<Functions>();
  if (!functions->load() || functions->init() != success) return nullptr;
  // From here on the destructor ends what init began.
  std::unique_ptr<Nvml> nvml(new Nvml);
  nvml->functions_ = std::move(functions);
  Functions& f = *nvml->functions_;
  return f.device_by_bus(pci_bus.c_str(), &f.device) == success ? std::move(nvml) : nullptr;
}

std::optional<std::size_t> Nvml::used_bytes() const noexcept {
  Memory memory{};
  if (functions_->memory(functions_->device, &memory) != success) return std::nullopt;
  return static_cast<std::size_t>(memory.used);
}

std::optional<std::size_t> Nvml::own_bytes() const {
  const std::vector<Process> all = functions_->running();
  const auto own = std::ranges::find_if(all, is_own);
  if (own == all.end() || !is_counted(*own)) return std::nullopt;
  return static_cast<std::size_t>(own->used);
}

std::string Nvml::other_holders() const {
  std::string text;
  for (const Process& process : functions_->running()) {
    if (is_own(process) || !is_counted(process)) continue;
    const std::string name = functions_->name_of(process.pid);
    text += fmt::format("{}process {}{} holds {}", text.empty() ? "" : ", ", process.pid,
                        name.empty() ? "" : fmt::format(" ({})", name),
                        format_bytes(static_cast<std::size_t>(process.used)));
  }
  return text;
}

}  // namespace tandem
