#include "gpu_ops/device/cuda_device_ranges.hpp"

#include <nvtx3/nvToolsExt.h>

namespace tandem {

std::unique_ptr<NvtxRanges> NvtxRanges::open() {
  // Answered by the profiler; where there is none, NVTX itself answers null.
  const nvtxDomainHandle_t domain = nvtxDomainCreateA("tandem");
  return domain == nullptr ? nullptr : std::unique_ptr<NvtxRanges>(new NvtxRanges(domain));
}

NvtxRanges::~NvtxRanges() { nvtxDomainDestroy(domain_); }

std::uint32_t NvtxRanges::category(std::string_view lane) {
  const std::lock_guard lock(mutex_);
  const auto known = categories_.find(lane);
  if (known != categories_.end()) return known->second;
  const auto id = static_cast<std::uint32_t>(categories_.size() + 1);  // 0 means none
  const auto added = categories_.emplace(lane, id).first;
  nvtxDomainNameCategoryA(domain_, id, added->first.c_str());
  return id;
}

RangeSink::Id NvtxRanges::begin(std::string_view lane, const std::string& name, std::size_t bytes) {
  nvtxEventAttributes_t attributes{};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.category = category(lane);
  attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
  attributes.message.ascii = name.c_str();
  if (bytes > 0) {
    attributes.payloadType = NVTX_PAYLOAD_TYPE_UNSIGNED_INT64;
    attributes.payload.ullValue = bytes;
  }
  return nvtxDomainRangeStartEx(domain_, &attributes);
}

void NvtxRanges::end(Id range) noexcept { nvtxDomainRangeEnd(domain_, range); }

}  // namespace tandem
