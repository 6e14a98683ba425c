#include "cli/common/shipped_profiles.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "core/base/error.hpp"

namespace tandem {

MachineProfile find_profile(const std::string& name) {
  std::error_code ignored;
  const bool is_path = name.find('/') != std::string::npos || name.ends_with(".toml");
  if (is_path || std::filesystem::exists(name, ignored)) return read_profile(name);
  const auto shipped = shipped_profiles();
  const auto found = std::ranges::find(shipped, name, &ShippedProfile::name);
  if (found != shipped.end()) return parse_profile(found->toml, name);
  std::string names;
  for (const ShippedProfile& profile : shipped) names += fmt::format("{}{}", names.empty() ? "" : ", ", profile.name);
  throw UsageError(fmt::format("--profile {}", name), "neither a file nor a profile that tandem brings along",
                   fmt::format("those are {}", names));
}

}  // namespace tandem
