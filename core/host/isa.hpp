#pragma once
// Instruction sets, chosen at run time.
#include <cstdint>
#include <string_view>
#include <vector>

namespace tandem {

enum class Isa : std::uint8_t { scalar, avx2, avx512 };

std::string_view name_of(Isa isa) noexcept;
/// Instruction sets that this processor and its operating system run, scalar first, best last; none beyond the limit
/// of the environment variable TANDEM_MAX_ISA (scalar, avx2 or avx512), which is read once. The first call throws
/// UsageError where its value is none of these.
const std::vector<Isa>& supported_isas();
/// The last of them.
Isa best_isa();

}  // namespace tandem
