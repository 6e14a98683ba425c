#include "cli/common/launch_environment.hpp"

#include <fmt/format.h>

#include <cstdlib>
#include <string>

#include "core/base/error.hpp"

namespace tandem {

std::optional<LaunchFacts> launch_of_environment() {
  return launch_facts([](std::string_view name) -> std::optional<std::string> {
    const char* const value = std::getenv(std::string(name).c_str());
    return value == nullptr ? std::nullopt : std::optional<std::string>(value);
  });
}

void require_one_process(std::string_view command) {
  const std::optional<LaunchFacts> launch = launch_of_environment();
  if (!launch) return;
  throw UsageError(std::string(command),
                   fmt::format("this is process {} of {} of a launch, and only train works across processes",
                               launch->rank.index, launch->rank.count),
                   "run it without the launcher");
}

}  // namespace tandem
