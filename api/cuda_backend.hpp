#pragma once
// The CUDA device as the device factory sees it: one of two files stands behind this header, chosen by the
// build. Internal to api.
#include <memory>
#include <string>

#include "api/open_device.hpp"
#include "core/device.hpp"

namespace tandem {

/// Empty where `open_cuda` can be expected to work, else why not: "no NVIDIA driver is installed". Takes no
/// device memory.
std::string why_no_cuda();
/// What a device is to do where host memory cannot be pinned: empty where that is an error.
Notice pageable_notice(const DeviceOptions& options);
/// `ordinal` below 0: the first that can be used. Throws DeviceError, PlanError.
std::unique_ptr<Device> open_cuda(int ordinal, const DeviceOptions& options);

}  // namespace tandem
