#pragma once
// Digest of a model's weights, wherever they come from.
#include <cstdint>
#include <string>

#include "core/host/parallel.hpp"
#include "core/params/parameter_layout.hpp"
#include "train/hf/model_source.hpp"

namespace tandem {

/// XXH3-128 over the names, counts and fp32 values of all parameters, in the layout's order, and over the factors of
/// adapters, as 32 hexadecimal digits.
/// Of a source without weights, the random ones of `seed`. Reads all of them. Blocks; throws as initial_values().
std::string weights_digest(const ModelSource& source, const ParameterLayout& layout, std::uint64_t seed,
                           Parallel* threads = nullptr);

}  // namespace tandem
