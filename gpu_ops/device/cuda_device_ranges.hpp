#pragma once
// Named ranges for profilers such as Nsight Systems, by NVTX. Internal to gpu_ops.
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "core/base/named_range.hpp"

struct nvtxDomainRegistration_st;

namespace tandem {

/// Ranges in the domain "tandem", each lane a category, bytes the payload. A range around calls that queue work on the
/// device is what a profiler projects onto the work itself.
class NvtxRanges final : public RangeSink {
 public:
  /// Null where no profiler is attached.
  static std::unique_ptr<NvtxRanges> open();
  ~NvtxRanges() override;
  NvtxRanges(const NvtxRanges&) = delete;
  NvtxRanges& operator=(const NvtxRanges&) = delete;

  Id begin(std::string_view lane, const std::string& name, std::size_t bytes) override;
  void end(Id range) noexcept override;

 private:
  explicit NvtxRanges(nvtxDomainRegistration_st* domain) : domain_(domain) {}
  std::uint32_t category(std::string_view lane);

  nvtxDomainRegistration_st* const domain_;
  std::mutex mutex_;
  std::map<std::string, std::uint32_t, std::less<>> categories_;
};

}  // namespace tandem
