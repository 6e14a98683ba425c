#pragma once
// The optimizers that update the state.
#include <cstdint>
#include <string_view>

namespace tandem {

/// Lion has a single moment, and so no array v.
enum class Optimizer : std::uint8_t { adamw, lion };

/// "AdamW", "Lion".
constexpr std::string_view name_of(Optimizer optimizer) noexcept {
  return optimizer == Optimizer::lion ? "Lion" : "AdamW";
}

}  // namespace tandem
