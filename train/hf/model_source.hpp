#pragma once
// Sources of models: what --model may name.
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/host/parallel.hpp"
#include "core/params/parameter_layout.hpp"
#include "core/params/weight_encoder.hpp"
#include "io/checkpoint.hpp"
#include "models/config/config.hpp"

namespace tandem {

class AdapterSource;
class HfWeightFiles;
struct TrainConfig;

/// A model description and, where there are any, its weights.
struct ModelSource {
  ModelConfig config;
  std::shared_ptr<HfWeightFiles> weights;  ///< tensors of a Hugging Face directory; null: none
  std::unique_ptr<Checkpoint> checkpoint;  ///< null: none
  /// An adapter that belongs on top of them, which `config.lora` describes; null: none, or one that is made anew.
  std::shared_ptr<const AdapterSource> adapter{};
  /// Checkpoints that hold trained parameters alone, on top of the weights, the last on top of all.
  std::vector<std::shared_ptr<const Checkpoint>> on_top{};
  std::string base{};  ///< path or name that the weights came from, or the last of `on_top`
  /// Seed of random weights, of a built-in shape that an adapter was trained over.
  std::optional<std::uint64_t> random_seed{};
  bool bytes = false;              ///< its tokens are known to be bytes of text
  std::vector<FileBeside> beside;  ///< tokenizer and generation files that came with the weights
  /// Closes the files of the weights, for when these have been loaded. They are opened again where they are asked for.
  void close_weights() const;
  bool loads_weights() const noexcept { return weights != nullptr || checkpoint != nullptr || random_seed; }
};

/// Purpose of a lookup of a model.
struct ModelLookup {
  std::string_view typed = "--model";  ///< flag or word before the name, for errors
  bool trains = true;                  ///< false: weights are needed, and no advice is for training
  bool from_scratch = false;           ///< its weights are not wanted: those that cannot be read are no matter
  std::filesystem::path out{};         ///< the run's own folder, which may have the name of a built-in shape
  /// Command that takes a model and, by --model, where its base is now; empty: one that trains, and takes no two.
  std::string_view command{};
  std::string base_at{};        ///< where the base of the model is now; empty: where the model says
  std::string folder{};         ///< run that was named, of a checkpoint in it; empty: the checkpoint itself
  int above = 0;                ///< checkpoints and adapters that name this one as their base
  std::string adapter_above{};  ///< adapter that names this one as its base; empty: none
};

/// The source that `name` stands for: a built-in shape, a config.json, a Hugging Face directory, a checkpoint, a run
/// directory (its newest good checkpoint), or a name of the hub that is in its local cache. A folder that holds an
/// adapter, of PEFT's or of a run that trained one, stands for that on top of its base: the model beside it, else that
/// of `lookup.base_at`, else the one that it names; a checkpoint without frozen parameters for itself on top of the
/// model that has them. Throws UsageError where it is none of these, a built-in shape and a path at once, or its base
/// is not there; InputError where its files are bad, or weights lie there in a format that is not read.
ModelSource find_model(const std::string& name, const ModelLookup& lookup = {});

/// find_model() for commands that need weights. Throws UsageError where there are none.
ModelSource find_trained_model(const std::string& name, const ModelLookup& lookup);

/// Takes the adapters of a run into its model: those that its flags describe, or the one that --adapter names or that
/// came with the model, whose description is then the configuration's too. `opens`: whether --adapter is opened, whose
/// values a resumed run has no need of. Throws UsageError where flags contradict it or one another, or as
/// lora_config().
void take_adapters(TrainConfig& config, ModelSource& source, bool opens = true);

/// Takes ranks and alphas by module, which no flag says, from the checkpoint that a run goes on from.
void take_patterns(TrainConfig& config, const Checkpoint& checkpoint);

/// Whether the source has every tensor of the layout, and no other, each of its shape: throws InputError that names
/// those missing, unexpected or misshapen. A source without weights has nothing to check.
void check_weights(const ModelSource& source, const ParameterLayout& layout);

/// Whether the source's adapter fits the layout, and, of a checkpoint's adapter, whether its base is that of the source
/// as far as one small matrix tells: all of it is compared where the weights are read. A source without adapter has
/// nothing to check. Throws InputError that names what differs.
void check_adapter(const ModelSource& source, const ParameterLayout& layout);

/// Gives elements [first, first + values.size()) of a parameter; all of it in order, in pieces of any size.
using ParameterValues = std::function<void(const Parameter&, std::int64_t first, std::span<float> values)>;
/// Initial values of parameters: from the source's weights, checked as above, else random from `seed`, made on
/// `threads` (null: the caller's own), which must outlive the result. A tensor with values that are not finite is
/// warned of by name when it has been read.
ParameterValues initial_values(const ModelSource& source, const ParameterLayout& layout, std::uint64_t seed,
                               Parallel* threads = nullptr);

/// Hands codes and scales of a coded parameter that is stored so to a sink; false where it is to be encoded of its
/// values.
using ParameterCodes = std::function<bool(const Parameter&, CodeSink& sink)>;
/// Codes that the source's weights have already. After initial_values() or check_weights(), which check them.
ParameterCodes initial_codes(const ModelSource& source);

}  // namespace tandem
