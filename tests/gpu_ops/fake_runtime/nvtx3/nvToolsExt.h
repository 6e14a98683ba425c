#pragma once
// The part of NVTX that gpu_ops/device/cuda_device_ranges.cpp calls, declared anew and answered by a profiler that does not
// exist (fake_profiler.hpp). Names and meaning are NVIDIA's.
#include <cstdint>

struct nvtxDomainRegistration_st;
using nvtxDomainHandle_t = nvtxDomainRegistration_st*;
using nvtxRangeId_t = std::uint64_t;

constexpr std::uint16_t NVTX_VERSION = 3;
constexpr std::int32_t NVTX_MESSAGE_TYPE_ASCII = 1;
constexpr std::int32_t NVTX_PAYLOAD_TYPE_UNSIGNED_INT64 = 1;

struct nvtxEventAttributes_t {
  std::uint16_t version;
  std::uint16_t size;
  std::uint32_t category;
  std::int32_t payloadType;
  union {
    std::uint64_t ullValue;
  } payload;
  std::int32_t messageType;
  union {
    const char* ascii;
  } message;
};
constexpr std::uint16_t NVTX_EVENT_ATTRIB_STRUCT_SIZE = sizeof(nvtxEventAttributes_t);

nvtxDomainHandle_t nvtxDomainCreateA(const char* name);
void nvtxDomainDestroy(nvtxDomainHandle_t domain);
void nvtxDomainNameCategoryA(nvtxDomainHandle_t domain, std::uint32_t category, const char* name);
nvtxRangeId_t nvtxDomainRangeStartEx(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* attributes);
void nvtxDomainRangeEnd(nvtxDomainHandle_t domain, nvtxRangeId_t range);
