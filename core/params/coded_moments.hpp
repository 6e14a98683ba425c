#pragma once
// Moments in a byte each (core/numerics/moment_codes.hpp) as fp32, and back.
#include <cstdint>
#include <span>

#include "core/params/state_array.hpp"

namespace tandem {

/// Decodes elements [first, first + values.size()) of `records`, of m or of v.
void decode_moments(StateArray array, const std::uint8_t* records, std::int64_t first, std::span<float> values);
/// Encodes values, rounded to nearest; decoded values come back bit for bit. Other elements in the first and the last
/// block keep their values, if the new exponent has them.
void encode_moments(StateArray array, std::span<const float> values, std::uint8_t* records, std::int64_t first);

}  // namespace tandem
