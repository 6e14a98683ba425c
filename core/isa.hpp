#pragma once
// Instruction sets, chosen at run time.
#include <cstdint>
#include <string_view>
#include <vector>

namespace tandem {

enum class Isa : std::uint8_t { scalar, avx2, avx512 };

std::string_view name_of(Isa isa) noexcept;
/// What this processor (and its operating system) can run, scalar first, best last.
const std::vector<Isa>& supported_isas();
/// The last of them.
Isa best_isa() noexcept;

}  // namespace tandem
