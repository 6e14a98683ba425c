#include "api/ops_rules.hpp"

#include <fmt/format.h>

#include "core/base/error.hpp"
#include "cpu_ops/device/host_ops.hpp"
#include "gpu_ops/base/scratch.hpp"

namespace tandem {

std::unique_ptr<OpsRules> rules_of(std::string_view kind, int threads) {
  if (kind == "host") return std::make_unique<HostRules>(threads);
  if (kind == "cuda") return std::make_unique<gpu::TypicalRules>();
  throw UsageError(fmt::format("a device of kind '{}'", kind), "there are \"host\" and \"cuda\"");
}

}  // namespace tandem
