#include "gpu_ops/device/runtime.hpp"

#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <nvtx3/nvToolsExtCudaRt.h>

#include <array>
#include <map>
#include <mutex>
#include <optional>

struct CUctx_st;

namespace tandem::gpu::runtime {
namespace {

/// Errors after which the context is gone: the runtime returns them again and again, and its header says of most that
/// the process has to be started anew.
bool is_lost(cudaError_t code) {
  switch (code) {
    case cudaErrorDevicesUnavailable:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContained:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorContextIsDestroyed:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorTensorMemoryLeak:
    case cudaErrorMpsClientTerminated:
    case cudaErrorExternalDevice:
    case cudaErrorUnknown:
      return true;
    default:
      return false;
  }
}

/// Explanation that CUDA's own error texts leave out.
std::string_view cause_of(cudaError_t code) {
  switch (code) {
    case cudaErrorUnsupportedPtxVersion:
      return ": the driver is to compile the kernels for this GPU and is older than the toolkit they were made with; "
             "update it";
    case cudaErrorNoKernelImageForDevice:
      return ": this build has no code for this GPU; build it with CMAKE_CUDA_ARCHITECTURES of its compute capability";
    case cudaErrorLaunchTimeout:
      return ": the system ends kernels that take seconds on a GPU that also draws a screen";
    default:
      return "";
  }
}

std::string describe(cudaError_t code) {
  return fmt::format("{} ({}){}", cudaGetErrorString(code), cudaGetErrorName(code), cause_of(code));
}

/// The device that this thread used last, for messages: a lost device may not even say which it is.
int& last_used() {
  thread_local int ordinal = 0;
  return ordinal;
}

[[noreturn]] void report(cudaError_t code, std::string_view what) {
  const bool lost = is_lost(code);
  throw RuntimeError(fmt::format("cuda:{}: {}{}", last_used(), lost ? "device lost: " : "", what), describe(code),
                     lost);
}

/// Throws for an error that a function of the runtime returned.
[[noreturn]] void refuse(cudaError_t code, std::string_view what) {
  // A pending error would be blamed on the next call.
  static_cast<void>(cudaGetLastError());
  report(code, what);
}

void check(cudaError_t code, std::string_view what) {
  if (code != cudaSuccess) refuse(code, what);
}

/// Drops an error where nothing can be reported, nor has to be: the next call reports it.
void forgive(cudaError_t code) noexcept {
  if (code != cudaSuccess) static_cast<void>(cudaGetLastError());
}

/// The driver's functions for what the runtime cannot do: making no device current again. Declared here, since the
/// driver's header would be needed for nothing else; CUresult and cudaError_t have the same numbers.
struct Driver {
  int (*device)(int* device, int ordinal);
  int (*retain)(CUctx_st** context, int device);
  int (*current)(CUctx_st** context);
  int (*push)(CUctx_st* context);
  int (*pop)(CUctx_st** context);
};

/// The CUDA version that driver functions are looked up by: one that has them as declared here. Not the build's own,
/// since a driver of an older minor version, which runs the program all the same, refuses a lookup by a version newer
/// than its own.
constexpr unsigned int driver_functions_of = 12000;

template <class Function>
void take(const char* name, Function*& function) {
  void* found = nullptr;
  auto status = cudaDriverEntryPointSuccess;
  check(cudaGetDriverEntryPointByVersion(name, &found, driver_functions_of, cudaEnableDefault, &status),
        "asking for the driver's functions");
  if (status != cudaDriverEntryPointSuccess) {
    throw RuntimeError("the NVIDIA driver cannot be used", fmt::format("it has no {}", name), false);
  }
  function = reinterpret_cast<Function*>(found);
}

/// Asked for once; again where that failed. Makes no context.
const Driver& driver() {
  static const Driver functions = [] {
    Driver asked{};
    take("cuDeviceGet", asked.device);
    take("cuDevicePrimaryCtxRetain", asked.retain);
    take("cuCtxGetCurrent", asked.current);
    take("cuCtxPushCurrent", asked.push);
    take("cuCtxPopCurrent", asked.pop);
    return asked;
  }();
  return functions;
}

/// Throws for an error of the driver, which leaves nothing pending in the runtime.
void check_driver(int result, std::string_view what) {
  if (result != cudaSuccess) report(static_cast<cudaError_t>(result), what);
}

/// The contexts that make_context() made, by ordinal.
class Contexts {
 public:
  static Contexts& get() {
    static Contexts* const all = new Contexts;  // for good: memory is given back until the program has ended
    return *all;
  }
  void set(int ordinal, CUctx_st* context) {
    const std::lock_guard lock(mutex_);
    made_[ordinal] = context;
  }
  /// Null where none was made.
  CUctx_st* of(int ordinal) {
    const std::lock_guard lock(mutex_);
    const auto found = made_.find(ordinal);
    return found == made_.end() ? nullptr : found->second;
  }

 private:
  std::mutex mutex_;
  std::map<int, CUctx_st*> made_;
};

/// Makes a call that gives something back, with the device current. Made all the same where that is refused: what is
/// kept would be worse than a context too many.
template <class Call>
void give_back(int ordinal, const Call& call) noexcept {
  std::optional<CurrentDevice> current;
  try {
    current.emplace(ordinal);
  } catch (...) {
  }
  forgive(call());
}

int attribute_of(cudaDeviceAttr which, int ordinal) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, ordinal), "reading a device attribute");
  return value;
}

}  // namespace

// -- which devices there are ---------------------------------------------------------------------------

Versions versions() {
  Versions result{.runtime = CUDART_VERSION};
  // Without a driver this succeeds and leaves zero.
  forgive(cudaDriverGetVersion(&result.driver));
  return result;
}

DeviceCount count_devices() {
  DeviceCount result;
  const cudaError_t code = cudaGetDeviceCount(&result.devices);
  if (code == cudaSuccess) return result;
  forgive(code);
  return {.devices = 0, .driver_too_old = code == cudaErrorInsufficientDriver, .error = describe(code)};
}

DeviceFacts facts_of(int ordinal) {
  const auto attribute = [&](cudaDeviceAttr which) { return attribute_of(which, ordinal); };
  DeviceFacts facts;
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, ordinal), "reading the device properties");
  facts.name = &properties.name[0];
  facts.major = attribute(cudaDevAttrComputeCapabilityMajor);
  facts.minor = attribute(cudaDevAttrComputeCapabilityMinor);
  facts.multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
  facts.cache_bytes = static_cast<std::size_t>(attribute(cudaDevAttrL2CacheSize));
  std::array<char, 32> bus{};
  check(cudaDeviceGetPCIBusId(bus.data(), static_cast<int>(bus.size()), ordinal), "reading the PCI bus");
  facts.pci_bus = bus.data();
  return facts;
}

int compute_capability() {
  int current = 0;
  check(cudaGetDevice(&current), "asking for the current device");
  return attribute_of(cudaDevAttrComputeCapabilityMajor, current) * 10 +
         attribute_of(cudaDevAttrComputeCapabilityMinor, current);
}

void make_context(int ordinal) {
  last_used() = ordinal;
  check(cudaInitDevice(ordinal, 0, 0), "making the context");
  int device = 0;
  CUctx_st* context = nullptr;
  check_driver(driver().device(&device, ordinal), "making the context");
  // Anew each time: whoever has reset the device meanwhile ended the one before.
  check_driver(driver().retain(&context, device), "making the context");
  Contexts::get().set(ordinal, context);
}

void use_device(int ordinal) {
  last_used() = ordinal;
  check(cudaSetDevice(ordinal), "making the device current");
}

CurrentDevice::CurrentDevice(int ordinal) {
  last_used() = ordinal;
  if (Contexts::get().of(ordinal) == nullptr) make_context(ordinal);
  CUctx_st* const wanted = Contexts::get().of(ordinal);
  CUctx_st* now = nullptr;
  check_driver(driver().current(&now), "asking for the current device");
  if (now == wanted) return;
  check_driver(driver().push(wanted), "making the device current");
  pushed_ = true;
}

CurrentDevice::~CurrentDevice() {
  CUctx_st* gone = nullptr;
  if (pushed_) static_cast<void>(driver().pop(&gone));
}

// -- memory ------------------------------------------------------------------------------------------

FreeMemory free_memory() {
  FreeMemory result;
  check(cudaMemGetInfo(&result.free, &result.total), "asking for free memory");
  return result;
}

void* allocate(std::size_t bytes) {
  void* data = nullptr;
  const cudaError_t code = cudaMalloc(&data, bytes);
  if (code == cudaErrorMemoryAllocation) {
    forgive(code);
    return nullptr;
  }
  check(code, "allocating memory");
  return data;
}

void free(int ordinal, void* data) noexcept {
  give_back(ordinal, [=] { return cudaFree(data); });
}

void register_host(void* data, std::size_t bytes) {
  check(cudaHostRegister(data, bytes, cudaHostRegisterPortable), "registering host memory");
}

void unregister_host(int ordinal, void* data) noexcept {
  give_back(ordinal, [=] { return cudaHostUnregister(data); });
}

// -- streams and events ------------------------------------------------------------------------------

void StreamCloser::operator()(CUstream_st* stream) const noexcept {
  give_back(ordinal, [=] { return cudaStreamDestroy(stream); });
}

void EventCloser::operator()(CUevent_st* event) const noexcept {
  give_back(ordinal, [=] { return cudaEventDestroy(event); });
}

OwnedStream make_stream(int ordinal, const std::string& name, StreamPriority priority) {
  int last = 0, first = 0;  // the lower number goes first; both are 0 where there are no priorities
  check(cudaDeviceGetStreamPriorityRange(&last, &first), "asking for the priorities of streams");
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority == StreamPriority::first ? first : last),
        "making a stream");
  nvtxNameCudaStreamA(stream, name.c_str());
  return OwnedStream(stream, StreamCloser{ordinal});
}

void finish(int ordinal, CUstream_st* stream) noexcept {
  give_back(ordinal, [=] { return cudaStreamSynchronize(stream); });
}

OwnedEvent make_event(int ordinal) {
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync), "making an event");
  return OwnedEvent(event, EventCloser{ordinal});
}

void record(CUevent_st* event, CUstream_st* stream) { check(cudaEventRecord(event, stream), "recording an event"); }

void wait(CUstream_st* stream, CUevent_st* event) {
  check(cudaStreamWaitEvent(stream, event, cudaEventWaitDefault), "making a stream wait");
}

bool passed(CUevent_st* event) {
  const cudaError_t code = cudaEventQuery(event);
  if (code == cudaErrorNotReady) {
    forgive(code);
    return false;
  }
  check(code, "asking for an event");
  return true;
}

void synchronize(CUevent_st* event) { check(cudaEventSynchronize(event), "waiting for an event"); }

// -- work --------------------------------------------------------------------------------------------

void copy(void* to, const void* from, std::size_t bytes, CopyKind kind, CUstream_st* stream) {
  const cudaMemcpyKind native = kind == CopyKind::host_to_device   ? cudaMemcpyHostToDevice
                                : kind == CopyKind::device_to_host ? cudaMemcpyDeviceToHost
                                                                   : cudaMemcpyDeviceToDevice;
  check(cudaMemcpyAsync(to, from, bytes, native, stream), "queueing a copy");
}

void copy_peer(void* to, int to_ordinal, const void* from, int from_ordinal, std::size_t bytes, CUstream_st* stream) {
  check(cudaMemcpyPeerAsync(to, to_ordinal, from, from_ordinal, bytes, stream), "queueing a copy from a peer");
}

PeerAccess enable_peer(int ordinal, int peer) {
  int can = 0;
  check(cudaDeviceCanAccessPeer(&can, ordinal, peer), "asking for access to a peer");
  if (can == 0) return PeerAccess::none;
  // Enabled before by another device of this card, or refused, as to more peers than the machine allows: copies are
  // made all the same.
  const cudaError_t code = cudaDeviceEnablePeerAccess(peer, 0);
  if (is_lost(code)) refuse(code, "enabling access to a peer");
  forgive(code);
  return code == cudaSuccess                         ? PeerAccess::enabled
         : code == cudaErrorPeerAccessAlreadyEnabled ? PeerAccess::shared
                                                     : PeerAccess::none;
}

void disable_peer(int peer) { check(cudaDeviceDisablePeerAccess(peer), "ending access to a peer"); }

void fill(void* to, unsigned char byte, std::size_t bytes, CUstream_st* stream) {
  check(cudaMemsetAsync(to, byte, bytes, stream), "queueing a fill");
}

void require_launched(int result, std::string_view kernel) {
  if (result != cudaSuccess) refuse(static_cast<cudaError_t>(result), fmt::format("launching kernel {}", kernel));
}

void require_alive(CUstream_st* stream, std::string_view what) {
  const cudaError_t code = cudaStreamQuery(stream);
  if (is_lost(code)) refuse(code, what);
  forgive(code);
}

}  // namespace tandem::gpu::runtime
