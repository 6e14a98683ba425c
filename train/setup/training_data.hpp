#pragma once
// The data of a run, checked against its model.
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/token_source.hpp"
#include "train/config/config.hpp"
#include "train/hf/model_source.hpp"

namespace tandem {

/// Purpose that data is opened for; decides what errors advise, and whether pairs of answers are wanted.
enum class DataUse : std::uint8_t { training, evaluation, scores };

/// Maps and checks data. Throws InputError for bad files, UsageError for text given to a model whose weights
/// expect other tokens than bytes, InputError where pairs of answers go with another objective. `flag` is what the
/// names stood behind, for errors.
std::unique_ptr<TokenSource> open_tokens(const std::vector<std::string>& names, const TrainConfig& config,
                                         const ModelSource& source, std::string_view flag = "--data",
                                         DataUse use = DataUse::training);

/// Data that a run is trained on.
struct TrainingData {
  std::vector<std::unique_ptr<TokenSource>> sources;  ///< one of --data, or those of --mix; alike in kind and layout
  std::vector<std::string> names;                     ///< name of each, for messages
  std::vector<double> shares;                         ///< share of each of all windows; they add up to 1

  bool bytes() const noexcept { return sources.front()->bytes(); }
  /// Digest of the content of all, in their order, and of whether their documents are records.
  std::string digest() const;
};

/// Opens --data or --mix, one of which must be given. Throws as open_tokens does, and InputError where sources of a mix
/// differ in kind or layout.
TrainingData open_training_data(const TrainConfig& config, const ModelSource& source);

/// Sets the sequence length of a run over `data`, and the facts of its sequences; `eval_data` may be null. Throws as
/// sequence_length, and InputError where a source has no window.
void take_sequences(TrainConfig& config, const ModelConfig& model, const TrainingData& data,
                    const TokenSource* eval_data = nullptr);
/// Sets the length and whether records are kept apart for an evaluation, which nothing is predicted of.
void take_sequences(TrainConfig& config, const ModelConfig& model, const TokenSource& source, std::string_view name);

/// The sequence length of a run over `data`: as given; else a row's for data in rows, and the model's positions
/// but at most 1024 for a stream. Throws InputError where rows are longer than the model's positions.
std::int64_t sequence_length(const TrainConfig& config, const ModelConfig& model, const TokenSource& data);

}  // namespace tandem
