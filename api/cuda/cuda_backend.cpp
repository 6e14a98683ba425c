#include "api/cuda_backend.hpp"

#include <algorithm>
#include <memory>
#include <utility>

#include "core/base/error.hpp"
#include "core/host/wsl.hpp"
#include "cpu_ops/threads/parallel.hpp"
#include "cpu_ops/update/update_kernels.hpp"
#include "gpu_ops/device/cuda_device.hpp"
#include "gpu_ops/ops/cuda_ops.hpp"

namespace tandem {

std::string why_no_cuda() { return probe_cuda().why_none; }

std::unique_ptr<Device> open_cuda(int ordinal, const DeviceOptions& options) {
  CudaDeviceOptions cuda;
  cuda.ordinal = ordinal >= 0 ? ordinal : std::max(0, probe_cuda().first_usable);
  cuda.memory = options.memory;
  cuda.allocator = options.allocator;
  cuda.pageable = pageable_notice(options);
  cuda.slower_peers = options.warning;
  cuda.under_windows = runs_under_windows();
  cuda.make_ops = [slower = options.warning] { return make_cuda_ops(slower); };
  cuda.ops_key = cuda_ops_key;
  cuda.numa_node = options.numa_node;
  cuda.make_host_kernels = [threads = options.update_threads](std::shared_ptr<const NumaNode> node) {
    return make_host_update_kernels(make_parallel(threads, std::move(node)));
  };
  return std::make_unique<CudaDevice>(std::move(cuda));
}

}  // namespace tandem
