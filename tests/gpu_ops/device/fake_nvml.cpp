// A management library that says what a test wants: loaded by its name, as the driver's is.
#include <unistd.h>

#include <cstdio>
#include <cstring>

namespace {

struct {
  bool present = false;
  unsigned long long before = 0;
  unsigned long long after = 0;
  bool asked = false;
  unsigned long long (*used)() = nullptr;
  unsigned long long own_before = 0;
  unsigned long long own_after = 0;
  bool asked_of_processes = false;
} machine;

struct Memory {
  unsigned long long total, free, used;
};
struct Process {
  unsigned int pid;
  unsigned long long used;
  unsigned int gpu_instance, compute_instance;
};
constexpr int success = 0;
constexpr int failure = 999;
constexpr int insufficient_size = 7;

}  // namespace

extern "C" {

/// Read from the file by tests of that.
extern const unsigned fake_nvml_number;
const unsigned fake_nvml_number = 0x090e00;

/// Called by the test: whether the library works, and how much memory of the device it says is in use when it is first
/// asked, and from then on: a context, once made, stays.
void fake_nvml_set(bool present, unsigned long long before, unsigned long long after) {
  machine = {.present = present, .before = before, .after = after};
}
/// Called by the test: the library works, and `used` says how much is in use whenever it is asked.
void fake_nvml_count(unsigned long long (*used)()) { machine = {.present = true, .used = used}; }
/// Called by the test after either: how much this process is said to hold when processes are first listed, and from
/// then on; with 0 it is not listed.
void fake_nvml_set_own(unsigned long long before, unsigned long long after) {
  machine.own_before = before;
  machine.own_after = after;
}

int nvmlInit_v2() { return machine.present ? success : failure; }
int nvmlShutdown() { return success; }
int nvmlDeviceGetHandleByPciBusId_v2(const char* bus, void** device) {
  *device = &machine;
  return std::strncmp(bus, "ffff:", 5) == 0 ? success : failure;
}
int nvmlDeviceGetMemoryInfo(void*, Memory* memory) {
  *memory = {0, 0, machine.used != nullptr ? machine.used() : machine.asked ? machine.after : machine.before};
  machine.asked = true;
  return success;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void*, unsigned int* count, Process* list) {
  const unsigned long long own = machine.asked_of_processes ? machine.own_after : machine.own_before;
  const unsigned int listed = own > 0 ? 2 : 1;
  const bool room = *count >= listed;
  *count = listed;
  if (!room) return insufficient_size;
  list[0] = {4242, 10ULL << 30, 0, 0};
  if (own > 0) list[1] = {static_cast<unsigned int>(::getpid()), own, 0, 0};
  machine.asked_of_processes = true;
  return success;
}
int nvmlSystemGetProcessName(unsigned int, char* name, unsigned int bytes) {
  std::snprintf(name, bytes, "/usr/bin/python3");
  return success;
}
}
