#pragma once
// Programs that link this have an operator new that counts.
#include <cstdint>

namespace tandem::testing {

/// Allocations of all threads so far.
std::uint64_t allocations() noexcept;

}  // namespace tandem::testing
