#pragma once
// The CUDA device as the device factory sees it. Behind `why_no_cuda` and `open_cuda` stands one of two files, chosen
// by the build: cuda/cuda_backend.cpp or no_cuda.cpp. Internal to api.
#include <memory>
#include <string>

#include "api/open_device.hpp"
#include "core/device/device.hpp"

namespace tandem {

/// Empty where `open_cuda` can be expected to work, else why not: "no NVIDIA driver is installed". Takes no
/// device memory.
std::string why_no_cuda();
/// Notice for a device whose host memory cannot be pinned and stays pageable; empty with `strict`, which makes that an
/// error. Called by the factory for whichever device it opens.
Notice pageable_notice(const DeviceOptions& options);
/// Opens GPU `ordinal`, below 0: the first that can be used. Throws DeviceError, PlanError.
std::unique_ptr<Device> open_cuda(int ordinal, const DeviceOptions& options);

}  // namespace tandem
