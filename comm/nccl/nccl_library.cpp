#include "comm/nccl/nccl_library.hpp"

#include <fmt/format.h>

#include <string_view>

#include "core/base/error.hpp"
#include "gpu_ops/device/shared_library.hpp"

namespace tandem::nccl {
namespace {

constexpr const char* file_name = "libnccl.so.2";
constexpr const char* how_to_get_it =
    "python3 -m pip install nvidia-nccl-cu12 (for CUDA 13 nvidia-nccl-cu13), or name the folder of NCCL in "
    "TANDEM_CUDA_LIBS";

/// 0: it does not say.
int version_of(const gpu::SharedLibrary& library) {
  int version = 0;
  const auto get_version = library.function<int(int*)>("ncclGetVersion");
  return get_version != nullptr && get_version(&version) == success ? version : 0;
}

template <class Function>
void take(const gpu::SharedLibrary& library, const char* name, Function*& function) {
  function = library.function<Function>(name);
  if (function == nullptr) {
    throw DeviceError("NCCL cannot be used", fmt::format("{} has no {}", library.file(), name), how_to_get_it);
  }
}

Library found() {
  int newest = -1;  // version, among those that are too old
  std::string why =
      fmt::format("{} is neither in the system, nor in Python's packages, nor in TANDEM_CUDA_LIBS", file_name);
  const auto accepts = [&](const gpu::SharedLibrary& library) {
    const int version = version_of(library);
    if (version >= oldest_version) return true;
    if (version > newest) {
      newest = version;
      why = fmt::format("{} is NCCL {}, {} or later is needed", library.file(), version_text(version),
                        version_text(oldest_version));
    }
    return false;
  };
  const auto library = gpu::SharedLibrary::find({file_name}, accepts);
  if (!library) throw DeviceError("NCCL is missing", why, how_to_get_it);
  Library functions{.file = library->file(), .version = version_of(*library)};
  take(*library, "ncclGetUniqueId", functions.get_unique_id);
  take(*library, "ncclCommInitRankConfig", functions.init_rank);
  take(*library, "ncclCommGetAsyncError", functions.get_async_error);
  take(*library, "ncclCommFinalize", functions.finalize);
  take(*library, "ncclCommDestroy", functions.destroy);
  take(*library, "ncclCommAbort", functions.abort);
  take(*library, "ncclGroupStart", functions.group_start);
  take(*library, "ncclGroupEnd", functions.group_end);
  take(*library, "ncclSend", functions.send);
  take(*library, "ncclRecv", functions.receive);
  take(*library, "ncclGetErrorString", functions.error_text);
  take(*library, "ncclGetLastError", functions.last_error);
  return functions;
}

}  // namespace

// Up to 2.8 the first number counts thousands.
std::string version_text(int version) {
  return fmt::format("{}.{}.{}", version / (version < 10000 ? 1000 : 10000),
                     version / 100 % (version < 10000 ? 10 : 100), version % 100);
}

std::string Library::describe(int result) const {
  const char* text = error_text(result);
  std::string said = fmt::format("{} ({})", text == nullptr ? "unknown error" : text, result);
  const char* more = last_error(nullptr);
  if (more != nullptr && *more != '\0') said += fmt::format(": {}", more);
  return said;
}

const Library& load() {
  static const Library library = found();
  return library;
}

}  // namespace tandem::nccl
