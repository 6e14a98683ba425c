#include "api/profile_cache.hpp"

#include <fmt/format.h>

#include <cctype>
#include <cstdlib>
#include <string>

#include "io/atomic_file.hpp"

namespace tandem {

std::filesystem::path cached_profile_path(const Device& device) {
  std::filesystem::path root;
  if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache != nullptr && *cache != '\0') {
    root = cache;
  } else if (const char* home = std::getenv("HOME"); home != nullptr && *home != '\0') {
    root = std::filesystem::path(home) / ".cache";
  } else {
    return {};
  }
  std::string name = fmt::format("{}-{}", device.info().name, device.info().threads);
  for (char& c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '-';
  }
  return root / "tandem" / fmt::format("profile-{}.toml", name);
}

void cache_profile(const MachineProfile& profile, const std::filesystem::path& file) {
  if (file.has_parent_path()) create_directories_or_throw(file.parent_path());
  write_file_atomically(file, profile_toml(profile));
}

}  // namespace tandem
