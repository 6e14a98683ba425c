#pragma once
// Names of devices, as users write them.
#include <string>
#include <string_view>
#include <vector>

namespace tandem {

struct DeviceName {
  enum class Kind { automatic, host, cuda };
  Kind kind = Kind::automatic;
  int ordinal = -1;  ///< CUDA's number of the GPU; -1: the first that can be used
};

/// Parses "auto", "host" (or "cpu"), "cuda" or "cuda:N". Throws UsageError for another name.
DeviceName parse_device_name(std::string_view text);

/// Splits one such name, or several of one kind with commas between, GPUs by their numbers: "cuda:0,cuda:1",
/// "host,host". Throws UsageError for others.
std::vector<std::string> split_device_names(std::string_view text);

/// Throws UsageError where there are several: `what` takes one.
void require_one_device(std::string_view text, std::string_view what);

}  // namespace tandem
