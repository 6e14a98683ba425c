#pragma once
// Hashes of a base model's frozen parameters: checkpoints of adapters hold these in place of the values.
#include <functional>
#include <map>
#include <string>

#include "core/params/parameter_layout.hpp"
#include "io/checkpoint.hpp"
#include "train/hf/model_source.hpp"

namespace tandem {

/// Hash of each frozen parameter's values, as the state digest has it, by full name: of the base's own, rounded to
/// bf16 where they are weights of bf16, whatever format they are stored in for training.
using BaseHashes = std::map<std::string, std::string>;

/// Passes values on, and tells `done` the hash of each frozen parameter when all of it has passed, in order.
ParameterValues hashing(ParameterValues values,
                        std::function<void(const Parameter& parameter, const std::string& hash)> done);

/// Throws InputError, of a parameter that is not the one that the checkpoint's adapters were trained over.
[[noreturn]] void refuse_base(const Checkpoint& checkpoint, const std::string& parameter);

/// Throws InputError as refuse_base, of the first parameter that has another hash than the checkpoint says.
void check_base(const Checkpoint& checkpoint, const BaseHashes& hashes);

}  // namespace tandem
