#pragma once
// How users call a device.
#include <string_view>

namespace tandem {

struct DeviceName {
  enum class Kind { automatic, host, cuda };
  Kind kind = Kind::automatic;
  int ordinal = -1;  ///< of a GPU as CUDA counts them; -1: the first that can be used
};

/// "auto", "host" (or "cpu"), "cuda" or "cuda:N". Throws UsageError for another.
DeviceName parse_device_name(std::string_view text);

}  // namespace tandem
