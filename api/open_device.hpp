#pragma once
// The device factory: the one place that knows every backend.
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "core/device/device.hpp"
#include "core/device/device_allocator.hpp"
#include "core/host/topology.hpp"
#include "scheduler/plan/plan.hpp"

namespace tandem {

struct DeviceOptions {
  std::size_t memory = 0;            ///< ceiling in bytes, of context and libraries too (DeviceInfo::reserved);
                                     ///< 0: what is free, less a margin
  DeviceAllocator allocator{};       ///< source of all device memory but context and libraries; none: the device itself
  int ordinal = -1;                  ///< GPU that "cuda" and "auto" are; -1: the first that can be used
  int threads = 0;                   ///< threads of the host device's kernels; 0: all cores
  int update_threads = 0;            ///< threads of the CPU update; 0: all cores, of the NUMA node where there is one
  int numa_node = -1;                ///< NUMA node of pinned memory and the update's threads; -1: the GPU's, else any
  double link_bytes_per_second = 0;  ///< host device: emulated link, each way; 0: none
  double update_parameters_per_second = 0;  ///< host device: emulated rate of the CPU update; 0: its own
  bool strict = false;                      ///< memory that cannot be pinned is an error; else it stays pageable
  Notice notice{};                          ///< told why "auto" takes the host device; may be empty
  Notice warning{};  ///< told what stays pageable, and what runs slower than it could; may be empty
};

/// "host" (or "cpu"), "cuda" (the GPU of DeviceOptions::ordinal), "cuda:N", or "auto": a GPU where a driver
/// answers and shows one, else the host device. Blocks. Throws UsageError for another name, a negative number of
/// threads, a memory node that is not there and, where it is a GPU, what only the host device emulates; DeviceError for
/// a device that is not there or that this build does not know, MisuseError for half an allocator, PlanError where a
/// GPU has less memory free than `memory` asks for, or none is left beside context and libraries.
std::unique_ptr<Device> open_device(std::string_view name, const DeviceOptions& options = {});

/// Facts about this device and machine that planning needs: the device's whole ceiling, however much of it is allocated
/// by now, and the host's memory that is free now.
PlanningFacts profile_of(const Device& device);
PlanningFacts profile_of(const Device& device, const Topology& machine);

/// Queues a function of the caller's on a stream of the host device: how a trainer with kernels of its
/// own runs them there. Asynchronous. What it throws fails the stream. Throws MisuseError on other devices.
void enqueue_host(Device& device, StreamView stream, std::string_view name, std::function<void()> work);

}  // namespace tandem
