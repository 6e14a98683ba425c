#pragma once
// Hashes of a base model's frozen parameters: checkpoints of adapters, and of runs over a base in fewer bits, hold
// these in place of the values.
#include <functional>
#include <map>
#include <string>

#include "core/params/parameter_layout.hpp"
#include "io/checkpoint.hpp"
#include "train/hf/model_source.hpp"

namespace tandem {

/// Hashes of frozen parameters, each as the state digest has it, by full name.
struct BaseHashes {
  std::map<std::string, std::string> stored;  ///< hashes of stored values; for coded parameters of their codes and
                                              ///< scales
  /// Hashes of the values that coded parameters have in the base itself, rounded to bf16.
  std::map<std::string, std::string> original;
};

/// Passes values on, and tells `done` the hash of each parameter that is `wanted` when all of it has passed, in order:
/// of its values, rounded to bf16 where they are weights of bf16.
ParameterValues hashing(ParameterValues values, std::function<bool(const Parameter&)> wanted,
                        std::function<void(const Parameter& parameter, const std::string& hash)> done);

/// Throws InputError that names the first parameter which is not the one that the checkpoint's state was trained over.
void check_base(const Checkpoint& checkpoint, const BaseHashes& hashes);
/// Throws InputError as that where the values of one parameter, of this hash, are not those.
void check_base(const Checkpoint& checkpoint, const Parameter& parameter, const std::string& hash_of_values);

}  // namespace tandem
