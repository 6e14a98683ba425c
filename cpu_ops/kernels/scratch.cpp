#include "cpu_ops/kernels/scratch.hpp"

#include "core/base/error.hpp"

namespace tandem::fast {

Workspace Workspace::after(std::size_t taken) const {
  const std::size_t used = align_up(taken);
  require(used);
  return {data + used, bytes - used};
}

void Workspace::require(std::size_t needed) const {
  if (needed > bytes) {
    throw MisuseError("workspace too small", "needs " + std::to_string(needed) + " bytes, has " + std::to_string(bytes),
                      "bind what workspace_bytes says");
  }
}

Blocks::Blocks(std::int64_t whole, std::int64_t most, std::int64_t multiple)
    : extent(whole), count(std::max<std::int64_t>(1, (whole + most - 1) / most)) {
  const std::int64_t even = (whole + count - 1) / count;
  size = std::max(multiple, (even + multiple - 1) / multiple * multiple);
  count = std::max<std::int64_t>(1, (whole + size - 1) / size);
}

}  // namespace tandem::fast
