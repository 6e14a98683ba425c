#pragma once
// NCCL (github.com/NVIDIA/nccl), loaded at run time, and declarations of the part of its interface that is used. They
// are the project's own, so that no build needs NCCL; a test compares them with NCCL's header where there is one.
#include <array>
#include <climits>
#include <cstddef>
#include <string>

struct CUstream_st;
struct ncclComm;

namespace tandem::nccl {

/// Values of ncclResult_t that are told apart.
enum Result : int { success = 0, in_progress = 7 };

/// Value of ncclDataType_t: an element is one byte, so that counts are bytes.
constexpr int byte_type = 1;

/// ncclUniqueId: the bytes by which the ranks of a communicator find each other.
struct UniqueId {
  std::array<char, 128> bytes;
};

/// ncclConfig_t of NCCL 2.19. The library reads `size` bytes of it, and takes defaults for what later versions added.
/// INT_MIN and null: the library's choice.
struct Config {
  std::size_t size = sizeof(Config);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 21900;
  int blocking = INT_MIN;
  int cga_cluster_size = INT_MIN;
  int min_ctas = INT_MIN;
  int max_ctas = INT_MIN;
  const char* net_name = nullptr;
  int split_share = INT_MIN;
};

/// NCCL's way to write versions: 21905 is 2.19.5.
constexpr int oldest_version = 21900;
std::string version_text(int version);

/// Functions of a library that was loaded, which stays so. Each returns a Result where nothing else is said.
struct Library {
  std::string file;  ///< path it was loaded from
  int version = 0;
  int (*get_unique_id)(UniqueId* id) = nullptr;
  int (*init_rank)(ncclComm** comm, int count, UniqueId id, int rank, Config* config) = nullptr;
  int (*get_async_error)(ncclComm* comm, int* state) = nullptr;
  int (*finalize)(ncclComm* comm) = nullptr;
  int (*destroy)(ncclComm* comm) = nullptr;
  int (*abort)(ncclComm* comm) = nullptr;
  int (*group_start)() = nullptr;
  int (*group_end)() = nullptr;
  int (*send)(const void* from, std::size_t count, int type, int peer, ncclComm* comm, CUstream_st* stream) = nullptr;
  int (*receive)(void* to, std::size_t count, int type, int peer, ncclComm* comm, CUstream_st* stream) = nullptr;
  const char* (*error_text)(int result) = nullptr;      ///< the words of a Result
  const char* (*last_error)(ncclComm* comm) = nullptr;  ///< words on the last error of the process, may be empty

  /// "unhandled system error (2): socket closed".
  std::string describe(int result) const;
};

/// Loads libnccl.so.2, of version 2.19 or later, from the system, Python's packages (nvidia-nccl-cu12, -cu13) or
/// TANDEM_CUDA_LIBS. Loads again only where that has failed. Thread-safe. Throws DeviceError, which says what was found
/// instead and what to install.
const Library& load();

}  // namespace tandem::nccl
