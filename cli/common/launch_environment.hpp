#pragma once
// Place of this process among several, as the environment has it.
#include <optional>
#include <string_view>

#include "comm/launch_facts.hpp"

namespace tandem {

/// Nothing where this process is not one of several. Throws UsageError as launch_facts.
std::optional<LaunchFacts> launch_of_environment();

/// Throws UsageError where this process is one of several: each would do the whole work of `command`.
void require_one_process(std::string_view command);

}  // namespace tandem
