// The project's declarations of NCCL's interface are those of NCCL's header: this file compiles.
#include <nccl.h>

#include <cstddef>
#include <type_traits>

#include "comm/nccl/nccl_library.hpp"

namespace tandem::nccl {
namespace {

static_assert(sizeof(UniqueId) == sizeof(ncclUniqueId) && alignof(UniqueId) == alignof(ncclUniqueId));
static_assert(int{success} == int{ncclSuccess} && int{in_progress} == int{ncclInProgress} &&
              byte_type == int{ncclUint8});
static_assert(sizeof(ncclResult_t) == sizeof(int) && sizeof(ncclDataType_t) == sizeof(int));

/// A later version may have more behind, of which the library takes defaults.
static_assert(sizeof(Config) <= sizeof(ncclConfig_t) && alignof(Config) == alignof(ncclConfig_t));
static_assert(offsetof(Config, size) == offsetof(ncclConfig_t, size));
static_assert(offsetof(Config, magic) == offsetof(ncclConfig_t, magic));
static_assert(offsetof(Config, version) == offsetof(ncclConfig_t, version));
static_assert(offsetof(Config, blocking) == offsetof(ncclConfig_t, blocking));
static_assert(offsetof(Config, cga_cluster_size) == offsetof(ncclConfig_t, cgaClusterSize));
static_assert(offsetof(Config, min_ctas) == offsetof(ncclConfig_t, minCTAs));
static_assert(offsetof(Config, max_ctas) == offsetof(ncclConfig_t, maxCTAs));
static_assert(offsetof(Config, net_name) == offsetof(ncclConfig_t, netName));
static_assert(offsetof(Config, split_share) == offsetof(ncclConfig_t, splitShare));
constexpr ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
static_assert(Config{}.magic == theirs.magic && Config{}.blocking == theirs.blocking);
static_assert(Config{}.version == NCCL_VERSION(2, 19, 0) && oldest_version == NCCL_VERSION(2, 19, 0));

/// Whether a function of ours takes what one of NCCL's takes, each argument in as many bytes.
template <class Ours, class Theirs>
struct SameArguments : std::false_type {};
template <class... Ours, class... Theirs>
requires(sizeof...(Ours) == sizeof...(Theirs)) struct SameArguments<int (*)(Ours...), ncclResult_t (*)(Theirs...)>
    : std::bool_constant<((sizeof(Ours) == sizeof(Theirs) &&
                           std::is_pointer_v<Ours> == std::is_pointer_v<Theirs>)&&...)> {
};

static_assert(SameArguments<decltype(Library::get_unique_id), decltype(&ncclGetUniqueId)>());
static_assert(SameArguments<decltype(Library::init_rank), decltype(&ncclCommInitRankConfig)>());
static_assert(SameArguments<decltype(Library::get_async_error), decltype(&ncclCommGetAsyncError)>());
static_assert(SameArguments<decltype(Library::finalize), decltype(&ncclCommFinalize)>());
static_assert(SameArguments<decltype(Library::destroy), decltype(&ncclCommDestroy)>());
static_assert(SameArguments<decltype(Library::abort), decltype(&ncclCommAbort)>());
static_assert(SameArguments<decltype(Library::group_start), decltype(&ncclGroupStart)>());
static_assert(SameArguments<decltype(Library::group_end), decltype(&ncclGroupEnd)>());
static_assert(SameArguments<decltype(Library::send), decltype(&ncclSend)>());
static_assert(SameArguments<decltype(Library::receive), decltype(&ncclRecv)>());
static_assert(std::is_same_v<decltype(&ncclGetErrorString), const char* (*)(ncclResult_t)>);
static_assert(std::is_same_v<decltype(&ncclGetLastError), const char* (*)(ncclComm_t)>);

}  // namespace
}  // namespace tandem::nccl
