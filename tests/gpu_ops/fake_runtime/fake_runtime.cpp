// The functions of the CUDA runtime, over a machine that does not exist.
#include <cuda_runtime_api.h>
#include <nvtx3/nvToolsExtCudaRt.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gpu_ops/device/runtime.hpp"
#include "gpu_ops/emulation/grid.hpp"
#include "tests/gpu_ops/fake_runtime/fake_default_streams.hpp"
#include "tests/gpu_ops/fake_runtime/fake_machine.hpp"

using tandem::fake_cuda::current_device;
using tandem::fake_cuda::issue;
using tandem::fake_cuda::Mark;
using tandem::fake_cuda::pass_mark;
using tandem::fake_cuda::State;
using tandem::fake_cuda::stream_of;
using tandem::fake_cuda::this_thread;
using tandem::fake_cuda::ThreadState;

/// The driver's handle of a context.
struct CUctx_st {
  int device;
};

namespace {

cudaError_t& pending() {
  thread_local cudaError_t code = cudaSuccess;
  return code;
}

cudaError_t end(cudaError_t code) {
  if (code != cudaSuccess) pending() = code;
  return code;
}

/// Runs `body` unless the call is to fail.
template <class Body>
cudaError_t call(const char* function, Body body) {
  const cudaError_t failure = State::get().enter(function);
  return end(failure == cudaSuccess ? body(State::get()) : failure);
}

/// Runs the body of a call that acts on the current context, unless the call is to fail.
template <class Body>
cudaError_t call_in_context(const char* function, Body body) {
  return call(function, [&](State& state) {
    state.enter_context();
    return body(state);
  });
}

/// Runs the body of a call that gives something back: it is gone even where the call fails.
template <class Body>
cudaError_t give_back(const char* function, Body body) {
  State::get().enter_context();
  const cudaError_t failure = State::get().enter(function);
  const cudaError_t code = body(State::get());
  return end(failure == cudaSuccess ? code : failure);
}

void queue_mark(CUstream_st* stream, const char* kind, std::shared_ptr<Mark> mark) {
  issue(stream, pass_mark(kind, std::move(mark), stream->device()));
}

cudaError_t wait_for_end(CUstream_st* stream) {
  auto mark = std::make_shared<Mark>();
  queue_mark(stream, "record", mark);
  mark->wait();
  return State::get().lost(stream->device());
}

struct Sides {
  const char* kind;
  bool from_device;
  bool to_device;
};

Sides sides_of(cudaMemcpyKind kind) {
  switch (kind) {
    case cudaMemcpyHostToDevice:
      return {"copy to device", false, true};
    case cudaMemcpyDeviceToHost:
      return {"copy to host", true, false};
    case cudaMemcpyDeviceToDevice:
      break;
  }
  return {"copy on device", true, true};
}

/// Whether device memory is where the copy says, at the call and again when the stream gets there.
bool sides_hold(const Sides& sides, const void* to, const void* from, std::size_t bytes) {
  State& state = State::get();
  return (sides.from_device ? state.on_device(from, bytes) : !state.touches_device(from, bytes)) &&
         (sides.to_device ? state.on_device(to, bytes) : !state.touches_device(to, bytes));
}

}  // namespace

// -- errors and devices ------------------------------------------------------------------------------

const char* cudaGetErrorName(cudaError_t code) {
  switch (code) {
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorInsufficientDriver:
      return "cudaErrorInsufficientDriver";
    case cudaErrorNoDevice:
      return "cudaErrorNoDevice";
    case cudaErrorECCUncorrectable:
      return "cudaErrorECCUncorrectable";
    case cudaErrorLaunchFailure:
      return "cudaErrorLaunchFailure";
    default:
      return "cudaErrorOfTheFake";
  }
}

const char* cudaGetErrorString(cudaError_t code) {
  switch (code) {
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorECCUncorrectable:
      return "uncorrectable ECC error encountered";
    case cudaErrorLaunchFailure:
      return "unspecified launch failure";
    default:
      return "an error of the fake";
  }
}

cudaError_t cudaGetLastError() { return std::exchange(pending(), cudaSuccess); }

cudaError_t cudaDriverGetVersion(int* version) {
  *version = State::get().machine().driver_version;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  return call("cudaGetDeviceCount", [&](State& state) {
    *count = static_cast<int>(state.machine().cards.size());
    return *count == 0 ? cudaErrorNoDevice : cudaSuccess;
  });
}

cudaError_t cudaGetDevice(int* ordinal) {
  return call("cudaGetDevice", [&](State&) {
    *ordinal = current_device();
    return cudaSuccess;
  });
}

cudaError_t cudaSetDevice(int ordinal) {
  return call("cudaSetDevice", [&](State& state) {
    if (!state.has_card(ordinal)) return cudaErrorInvalidDevice;
    state.make_context(ordinal);
    ThreadState& thread = this_thread();
    thread.chosen = ordinal;
    if (thread.contexts.empty()) thread.contexts.push_back(ordinal);
    thread.contexts.back() = ordinal;
    return cudaSuccess;
  });
}

cudaError_t cudaInitDevice(int ordinal, unsigned int, unsigned int) {
  return call("cudaInitDevice", [&](State& state) {
    if (!state.has_card(ordinal)) return cudaErrorInvalidDevice;
    state.make_context(ordinal);
    return cudaSuccess;
  });
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int ordinal) {
  return call("cudaGetDeviceProperties", [&](State& state) {
    const std::string& name = state.machine().cards.at(static_cast<std::size_t>(ordinal)).name;
    std::snprintf(properties->name, sizeof properties->name, "%s", name.c_str());
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int ordinal) {
  return call("cudaDeviceGetAttribute", [&](State& state) {
    const auto& card = state.machine().cards.at(static_cast<std::size_t>(ordinal));
    *value = attribute == cudaDevAttrComputeCapabilityMajor   ? card.major
             : attribute == cudaDevAttrComputeCapabilityMinor ? card.minor
             : attribute == cudaDevAttrL2CacheSize            ? card.cache
                                                              : 8;
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int bytes, int ordinal) {
  return call("cudaDeviceGetPCIBusId", [&](State&) {
    std::snprintf(text, static_cast<std::size_t>(bytes), "ffff:%02x:00.0", static_cast<unsigned int>(ordinal));
    return cudaSuccess;
  });
}

// -- the driver's contexts ---------------------------------------------------------------------------

namespace {

/// Runs `body` unless the call is to fail. The runtime keeps nothing of what the driver returns.
template <class Body>
int driver_call(const char* function, Body body) {
  const cudaError_t failure = State::get().enter(function);
  return failure == cudaSuccess ? body() : failure;
}

CUctx_st* handle_of(int device) {
  static std::array<CUctx_st, 16> handles = [] {
    std::array<CUctx_st, 16> all{};
    for (std::size_t i = 0; i < all.size(); ++i) all[i].device = static_cast<int>(i);
    return all;
  }();
  return &handles.at(static_cast<std::size_t>(device));
}

int device_get(int* device, int ordinal) {
  return driver_call("cuDeviceGet", [&] {
    *device = ordinal;
    return State::get().has_card(ordinal) ? cudaSuccess : cudaErrorInvalidDevice;
  });
}

int primary_retain(CUctx_st** context, int device) {
  return driver_call("cuDevicePrimaryCtxRetain", [&] {
    State::get().make_context(device);
    *context = handle_of(device);
    return cudaSuccess;
  });
}

int get_current(CUctx_st** context) {
  return driver_call("cuCtxGetCurrent", [&] {
    const ThreadState& thread = this_thread();
    *context = thread.contexts.empty() ? nullptr : handle_of(thread.contexts.back());
    return cudaSuccess;
  });
}

int push_current(CUctx_st* context) {
  return driver_call("cuCtxPushCurrent", [&] {
    if (!State::get().has_context(context->device)) return cudaErrorContextIsDestroyed;
    this_thread().contexts.push_back(context->device);
    return cudaSuccess;
  });
}

/// Gives back: the context is off the stack even where the call fails.
int pop_current(CUctx_st** context) {
  std::vector<int>& contexts = this_thread().contexts;
  *context = contexts.empty() ? nullptr : handle_of(contexts.back());
  const int code = driver_call("cuCtxPopCurrent", [&] { return *context ? cudaSuccess : cudaErrorInvalidValue; });
  if (*context) contexts.pop_back();
  return code;
}

}  // namespace

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned int version,
                                             unsigned long long, cudaDriverEntryPointQueryResult* status) {
  return call("cudaGetDriverEntryPointByVersion", [&](State&) {
    // A driver of an older minor version than the toolkit of this build runs it all the same, and refuses newer
    // functions.
    if (version >= CUDART_VERSION) return cudaErrorInvalidValue;
    const std::map<std::string_view, void*> functions = {
        {"cuDeviceGet", reinterpret_cast<void*>(device_get)},
        {"cuDevicePrimaryCtxRetain", reinterpret_cast<void*>(primary_retain)},
        {"cuCtxGetCurrent", reinterpret_cast<void*>(get_current)},
        {"cuCtxPushCurrent", reinterpret_cast<void*>(push_current)},
        {"cuCtxPopCurrent", reinterpret_cast<void*>(pop_current)}};
    const auto found = functions.find(name);
    *function = found == functions.end() ? nullptr : found->second;
    *status = found == functions.end() ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
    return cudaSuccess;
  });
}

// -- memory ------------------------------------------------------------------------------------------

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  return call_in_context("cudaMemGetInfo", [&](State& state) {
    *free = state.free_bytes(current_device());
    *total = state.machine().cards[static_cast<std::size_t>(current_device())].memory;
    return cudaSuccess;
  });
}

cudaError_t cudaMalloc(void** data, std::size_t bytes) {
  return call_in_context("cudaMalloc", [&](State& state) { return state.allocate(current_device(), bytes, data); });
}

cudaError_t cudaFree(void* data) {
  return give_back("cudaFree", [&](State& state) {
    return data == nullptr || state.free(data) ? cudaSuccess : cudaErrorInvalidValue;
  });
}

cudaError_t cudaHostRegister(void* data, std::size_t bytes, unsigned int) {
  return call_in_context("cudaHostRegister", [&](State& state) { return state.register_host(data, bytes); });
}

cudaError_t cudaHostUnregister(void* data) {
  return give_back("cudaHostUnregister",
                   [&](State& state) { return state.unregister_host(data) ? cudaSuccess : cudaErrorInvalidValue; });
}

// -- streams and events ------------------------------------------------------------------------------

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return call_in_context("cudaDeviceGetStreamPriorityRange", [&](State&) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int flags, int priority) {
  return call_in_context("cudaStreamCreateWithPriority", [&](State&) {
    *stream = new CUstream_st(current_device(), priority);
    if (flags != cudaStreamNonBlocking) tandem::fake_cuda::add_blocking(*stream);
    ++State::get().streams;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return give_back("cudaStreamDestroy", [&](State& state) {
    // Returns at once; what is queued still runs.
    tandem::fake_cuda::remove_blocking(stream);
    --state.streams;
    ++state.ending_streams;
    std::thread([stream] {
      delete stream;
      --State::get().ending_streams;
    }).detach();
    return cudaSuccess;
  });
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return give_back("cudaStreamSynchronize", [&](State&) { return wait_for_end(stream_of(stream)); });
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return call_in_context("cudaStreamQuery",
                         [&](State&) { return stream_of(stream)->idle() ? cudaSuccess : cudaErrorNotReady; });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int) {
  return call_in_context("cudaStreamWaitEvent", [&](State&) {
    const std::lock_guard lock(event->mutex);
    if (!event->latest) return cudaSuccess;
    CUstream_st* const queue = stream_of(stream);
    const auto wait = [mark = event->latest, device = queue->device()] { mark->wait_in_stream(device); };
    issue(queue, {.kind = "wait", .run = wait, .always = true});
    return cudaSuccess;
  });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
  return call_in_context("cudaEventCreateWithFlags", [&](State& state) {
    *event = new CUevent_st(current_device());
    ++state.events;
    return cudaSuccess;
  });
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return give_back("cudaEventDestroy", [&](State& state) {
    delete event;
    --state.events;
    return cudaSuccess;
  });
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return call_in_context("cudaEventRecord", [&](State&) {
    CUstream_st* const queue = stream_of(stream);
    if (event->device != queue->device()) return cudaErrorInvalidResourceHandle;
    auto mark = std::make_shared<Mark>();
    const std::lock_guard lock(event->mutex);
    queue_mark(queue, "record", mark);
    event->latest = std::move(mark);
    return cudaSuccess;
  });
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  return call("cudaEventQuery", [&](State&) {
    const std::lock_guard lock(event->mutex);
    return event->latest && !event->latest->passed() ? cudaErrorNotReady : cudaSuccess;
  });
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return call("cudaEventSynchronize", [&](State& state) {
    std::shared_ptr<Mark> mark;
    {
      const std::lock_guard lock(event->mutex);
      mark = event->latest;
    }
    if (mark) mark->wait();
    return state.lost(current_device());
  });
}

void nvtxNameCudaStreamA(cudaStream_t stream, const char* name) {
  stream_of(stream)->rename(name);
  State::get().note_priority(name, stream_of(stream)->priority());
}

// -- work --------------------------------------------------------------------------------------------

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  return call_in_context("cudaMemcpyAsync", [&](State& state) {
    const Sides sides = sides_of(kind);
    if (!sides_hold(sides, to, from, bytes)) return cudaErrorInvalidValue;
    const void* host = sides.from_device ? to : from;
    const bool on_device = sides.from_device && sides.to_device;
    const State::HostKind memory = on_device ? State::HostKind::registered : state.kind_of(host, bytes);
    if (memory == State::HostKind::mixed) return cudaErrorInvalidValue;
    if (sides.from_device != sides.to_device) {
      state.count_copy(sides.to_device, memory == State::HostKind::pageable ? bytes : 0);
    }
    // Pageable memory is read before the call returns, and written before it does.
    std::shared_ptr<std::vector<std::byte>> staged;
    if (memory == State::HostKind::pageable && !sides.from_device) {
      const auto* bytes_of = static_cast<const std::byte*>(from);
      staged = std::make_shared<std::vector<std::byte>>(bytes_of, bytes_of + bytes);
    }
    issue(stream_of(stream),
          {.kind = sides.kind, .run = [=] {
             const void* source = staged ? staged->data() : from;
             if (!sides_hold(sides, to, source, bytes)) {
               State::get().complain(std::string(sides.kind) + " of memory that was freed while it was queued");
               return;
             }
             std::memcpy(to, source, bytes);
           }});
    if (memory == State::HostKind::pageable && sides.from_device) return wait_for_end(stream_of(stream));
    return cudaSuccess;
  });
}

cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device, std::size_t bytes,
                                cudaStream_t stream) {
  return call_in_context("cudaMemcpyPeerAsync", [&](State&) {
    const auto sides_hold = [=] {
      return State::get().on_device(to, bytes, to_device) && State::get().on_device(from, bytes, from_device);
    };
    if (!sides_hold()) return cudaErrorInvalidValue;
    issue(stream_of(stream),
          {.kind = "copy from peer", .run = [=] {
             if (!sides_hold()) {
               return State::get().complain("copy from peer of memory that was freed while it was queued");
             }
             std::memcpy(to, from, bytes);
             if (State::get().breaks_copy(to_device, from_device))
               static_cast<std::byte*>(to)[bytes / 2] ^= std::byte{1};
           }});
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int ordinal, int peer) {
  return call("cudaDeviceCanAccessPeer", [&](State& state) {
    if (!state.has_card(ordinal) || !state.has_card(peer)) return cudaErrorInvalidDevice;
    *can = state.machine().peers && ordinal != peer ? 1 : 0;
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned int) {
  return call_in_context("cudaDeviceEnablePeerAccess",
                         [&](State& state) { return state.enable_peer(current_device(), peer); });
}

cudaError_t cudaDeviceDisablePeerAccess(int peer) {
  return call_in_context("cudaDeviceDisablePeerAccess",
                         [&](State& state) { return state.disable_peer(current_device(), peer); });
}

cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  return call_in_context("cudaMemsetAsync", [&](State& state) {
    if (!state.on_device(to, bytes)) return cudaErrorInvalidValue;
    issue(stream_of(stream), {.kind = "fill zero", .run = [=] {
                                if (!State::get().on_device(to, bytes)) {
                                  return State::get().complain("fill of memory that was freed while it was queued");
                                }
                                std::memset(to, value, bytes);
                              }});
    return cudaSuccess;
  });
}

namespace tandem::emulation {

/// Addresses that a kernel is given must be the device's: a GPU faults on others, the emulated kernels would not.
void see_argument(const char* name, const void* argument, std::size_t bytes) {
  // Code, heap and mappings lie here; sizes, strides and pairs of small numbers do not.
  constexpr std::uintptr_t lowest = std::uintptr_t{1} << 44, end = std::uintptr_t{1} << 47;
  for (std::size_t at = 0; at + sizeof(std::uintptr_t) <= bytes; at += sizeof(std::uintptr_t)) {
    std::uintptr_t word = 0;
    std::memcpy(&word, static_cast<const std::byte*>(argument) + at, sizeof word);
    if (word < lowest || word >= end || State::get().on_device(reinterpret_cast<const void*>(word), 1)) continue;
    State::get().complain(std::string("kernel ") + name + " is given an address that is not on the device");
  }
}

void enqueue(const char* name, CUstream_st* stream, std::function<void()> work) {
  gpu::runtime::require_launched(
      call_in_context("launch", [](State& state) { return state.load_code(current_device()); }), name);
  tandem::fake_cuda::issue(stream_of(stream), {.kind = "kernel", .run = std::move(work)});
}

}  // namespace tandem::emulation
