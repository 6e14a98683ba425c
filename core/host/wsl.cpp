#include "core/host/wsl.hpp"

#include <system_error>

namespace tandem {

// The device through which WSL2 reaches Windows' graphics drivers. The kernel's name says "microsoft" in containers
// without a GPU too, and a kernel of the user's own need not say it.
bool runs_under_windows(const std::filesystem::path& root) noexcept {
  try {
    std::error_code error;
    return std::filesystem::exists(root / "dev" / "dxg", error);
  } catch (...) {  // a path that cannot be made
    return false;
  }
}

}  // namespace tandem
