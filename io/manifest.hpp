#pragma once
// The manifest of a checkpoint, manifest.json: everything about it but the state. docs/checkpoints.md describes the
// keys.
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/error.hpp"
#include "core/numerics/optimizer.hpp"

namespace tandem {

struct CheckpointParameter {
  std::string name;
  std::vector<std::int64_t> shape;
  bool trainable = true;
  std::int64_t missed_updates = 0;  ///< updates of the state that left this parameter as it was
  /// Hash of a frozen parameter, as StateDigest::parameter_hash has it, whose values are not in the checkpoint but in
  /// the model that the run began with; empty: they are here. As it lies for training: of codes and scales, where it is
  /// stored so.
  std::string elsewhere{};
  std::string original{};  ///< hash of its values in that model, where it is coded for training; else empty
  std::int64_t count() const noexcept;
};

/// A file of the checkpoint beside the manifest.
struct CheckpointFile {
  std::string name;  ///< without any folder
  std::uint64_t bytes = 0;
  std::string hash;  ///< XXH3-128, 32 hexadecimal digits
};

/// Place in one of several sources of data.
struct CheckpointMixPart {
  double share = 1.0;  ///< share of all windows
  std::int64_t windows = 0, epoch = 0, position = 0;
};

struct Manifest {
  static constexpr int format = 1, format_over_base = 2;
  std::string tandem_version;
  std::string model_name;
  std::string model_config;  ///< text of a Hugging Face config.json
  std::string token_kind;    ///< "bytes" or "ids"
  std::string compute_key;
  std::string schedule;  ///< readable
  std::string plan;      ///< JSON of the outline of the plan it ran under, for people
  std::string state_digest;
  std::int64_t step = 0;       ///< steps taken, skipped ones included
  std::int64_t adam_step = 0;  ///< updates applied
  std::int64_t skipped_steps = 0;
  std::int64_t tokens = 0;  ///< targets so far
  std::optional<double> first_loss;
  std::optional<double> last_loss;
  std::optional<double> best_eval_loss;       ///< lowest so far, where one was kept
  std::int64_t best_step = 0;                 ///< its step
  std::optional<double> lowest_eval_loss;     ///< lowest loss of all that were due; empty: none was finite
  std::int64_t evaluations_without_gain = 0;  ///< in a row, up to the last one
  std::int64_t counted_evaluation = 0;        ///< step of the last periodic evaluation; 0: none yet
  std::uint64_t seed = 0;
  std::int64_t sampler_windows = 0;
  std::int64_t sampler_epoch = 0;
  std::int64_t sampler_position = 0;
  std::vector<CheckpointMixPart> mix;      ///< sources of --mix, in its order; else empty
  std::string data_digest;                 ///< digest of the data's content; empty: not known, as in older checkpoints
  Optimizer optimizer = Optimizer::adamw;  ///< optimizer of the state
  std::string adapter;      ///< adapters that the run trains, JSON as PEFT's adapter_config.json; empty: none
  std::string base_format;  ///< format of frozen matrices, "bf16"; empty where frozen parameters are in the checkpoint
  /// Path or name of the model that has the frozen parameters, where adapters do not name it; empty: random weights by
  /// the seed, or they are here.
  std::string base;
  std::vector<CheckpointParameter> parameters;
  std::vector<CheckpointFile> files;
};

/// A checkpoint of a later version of tandem: not damaged, and nothing to be passed over in favour of an older one.
struct NewerFormat : InputError {
  using InputError::InputError;
};

/// Reads a manifest that is not believed: every entry has its type, no number is negative, no shape
/// overflows, no file lies in another folder. Throws InputError that begins with `where`, NewerFormat.
Manifest parse_manifest(std::string_view text, const std::string& where);

/// The text that `parse_manifest` reads back.
std::string manifest_text(const Manifest& manifest);

}  // namespace tandem
