#pragma once
// Block of the flat arrays in which weights, gradients and state lie.
#include <cstdint>

#include "core/numerics/adam_state.hpp"

namespace tandem {

/// Elements in one block of the layout and of the norm, and the alignment of subgroups.
constexpr std::int64_t layout_quantum = 1024;
static_assert(layout_quantum % coded_record == 0, "a record of coded moments belongs to one processor");

}  // namespace tandem
