#pragma once
// Facts read from a library's file without loading it. Internal to gpu_ops.
#include <cstdint>
#include <optional>
#include <string>

namespace tandem::gpu {

/// The 32 bits of data that a library of this machine's kind exports as `symbol`. Empty where the file is none, or has
/// no such data.
std::optional<std::uint32_t> exported_number(const std::string& file, const std::string& symbol);

}  // namespace tandem::gpu
