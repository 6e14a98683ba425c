#include "tests/gpu_ops/fake_runtime/fake_profiler.hpp"

#include <nvtx3/nvToolsExt.h>

#include <map>
#include <mutex>

struct nvtxDomainRegistration_st {
  std::map<std::uint32_t, std::string> categories;
};

namespace tandem::fake_profiler {
namespace {

std::mutex mutex;
bool is_attached = false;
int living_domains = 0;
std::vector<SeenRange> ranges;

}  // namespace

void attach(bool attached) {
  const std::lock_guard lock(mutex);
  is_attached = attached;
  ranges.clear();
}

std::vector<SeenRange> seen() {
  const std::lock_guard lock(mutex);
  return ranges;
}

int domains() {
  const std::lock_guard lock(mutex);
  return living_domains;
}

}  // namespace tandem::fake_profiler

using namespace tandem::fake_profiler;

nvtxDomainHandle_t nvtxDomainCreateA(const char*) {
  const std::lock_guard lock(mutex);
  if (!is_attached) return nullptr;
  ++living_domains;
  return new nvtxDomainRegistration_st;
}

void nvtxDomainDestroy(nvtxDomainHandle_t domain) {
  const std::lock_guard lock(mutex);
  --living_domains;
  delete domain;
}

void nvtxDomainNameCategoryA(nvtxDomainHandle_t domain, std::uint32_t category, const char* name) {
  const std::lock_guard lock(mutex);
  domain->categories[category] = name;
}

nvtxRangeId_t nvtxDomainRangeStartEx(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* attributes) {
  const std::lock_guard lock(mutex);
  const bool counted = attributes->payloadType == NVTX_PAYLOAD_TYPE_UNSIGNED_INT64;
  ranges.push_back({.lane = domain->categories.at(attributes->category),
                    .name = attributes->message.ascii,
                    .bytes = counted ? attributes->payload.ullValue : 0});
  return ranges.size();
}

void nvtxDomainRangeEnd(nvtxDomainHandle_t, nvtxRangeId_t range) {
  const std::lock_guard lock(mutex);
  ranges.at(range - 1).ended = true;
}
