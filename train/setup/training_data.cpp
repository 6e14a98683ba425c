#include "train/setup/training_data.hpp"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "core/base/error.hpp"
#include "core/base/hash128.hpp"
#include "data/record_lengths.hpp"
#include "data/window_sampler.hpp"
#include "train/setup/run_request.hpp"

namespace tandem {

namespace {

/// Pairs of answers are for DPO alone, and it takes nothing else.
void require_objective(const TokenSource& data, const TrainConfig& config, std::string_view flag, DataUse use) {
  if (use == DataUse::scores) return;
  const bool pairs = use == DataUse::training && config.objective == Objective::dpo;
  if (data.pairs() == pairs) return;
  if (pairs) {
    throw InputError(flag, "it holds no pairs of answers, which --objective dpo learns from",
                     "prepare records with chosen and rejected answers, or leave out --objective dpo");
  }
  throw InputError(flag, "it holds pairs of answers, and half of them are not to be learnt",
                   use == DataUse::evaluation ? "tandem score gives their log-probabilities"
                                              : "train with --objective dpo, or prepare the answers to learn alone");
}

}  // namespace

std::unique_ptr<TokenSource> open_tokens(const std::vector<std::string>& names, const TrainConfig& config,
                                         const ModelSource& source, std::string_view flag, DataUse use) {
  auto data = std::make_unique<TokenSource>(std::vector<std::filesystem::path>(names.begin(), names.end()),
                                            TokenSourceOptions{.vocabulary = source.config.vocabulary,
                                                               .token_width = config.token_dtype,
                                                               .document_attention = config.document_attention});
  for (const std::string& notice : data->notices()) spdlog::warn("{}", notice);
  if (data->bytes() && source.loads_weights() && !source.bytes) {
    throw UsageError(flag, "text would be fed as bytes to a model whose weights expect its own tokens",
                     fmt::format("make token files with tools/prepare_data.py{}",
                                 use == DataUse::training ? ", or train with --from-scratch" : ""));
  }
  require_objective(*data, config, flag, use);
  return data;
}

namespace {

void require_alike(const TokenSource& first, const TokenSource& other, const std::string& name) {
  const auto refuse = [&](std::string_view why, std::string_view advice) {
    throw InputError(fmt::format("--mix {}", name), why, advice);
  };
  if (first.bytes() != other.bytes()) {
    refuse("text and token files are mixed", "give one kind; tools/prepare_data.py makes a .bin of text");
  }
  if (first.layout() != other.layout() || first.row_length() != other.row_length()) {
    refuse("its layout is another than that of the sources before it", "give sources of one layout and row length");
  }
}

}  // namespace

namespace {

/// Adds what a sample of a source's windows holds, `share` of all windows being of it.
void add_sequences(SequenceFacts& facts, const TokenSource& source, std::int64_t length, double share) {
  if (source.layout() == TokenLayout::stream && !source.masked() && !source.bounded()) {
    facts.target_share += share;  // every window is one record, and all of it targets
    return;
  }
  const WindowStatistics sample = window_statistics(source, length);
  const double each = share / static_cast<double>(sample.windows);
  facts.packed = source.bounded();
  if (facts.packed) {
    for (const auto& [tokens, count] : sample.records) facts.records[tokens] += each * static_cast<double>(count);
  }
  facts.target_share += each * static_cast<double>(sample.targets) / static_cast<double>(length);
}

}  // namespace

std::string TrainingData::digest() const {
  const std::string documents = sources.front()->document_attention() ? "; documents apart" : "";
  if (sources.size() == 1) return sources.front()->digest() + documents;
  Hash128 hash;
  for (const auto& source : sources) hash.add(source->digest().data(), source->digest().size());
  return hash.text() + documents;
}

void take_sequences(TrainConfig& config, const ModelConfig& model, const TrainingData& data,
                    const TokenSource* eval_data) {
  const std::int64_t length = sequence_length(config, model, *data.sources.front());
  SequenceFacts facts{.records = {}, .target_share = 0.0};
  for (std::size_t i = 0; i < data.sources.size(); ++i) {
    require_windows(*data.sources[i], length, data.names[i]);
    add_sequences(facts, *data.sources[i], length, data.shares[i]);
  }
  if (eval_data != nullptr && eval_data->bounded()) facts.packed = true;
  if (config.objective == Objective::dpo) {
    facts.scored = require_windows(*data.sources.front(), length);
    if (eval_data != nullptr) facts.held_out = require_windows(*eval_data, length, "--eval-data");
  }
  config.seq_len = length;
  config.sequences = std::move(facts);
}

void take_sequences(TrainConfig& config, const ModelConfig& model, const TokenSource& source, std::string_view name) {
  const std::int64_t length = sequence_length(config, model, source);
  require_windows(source, length, name);
  config.seq_len = length;
  config.sequences.packed = source.bounded();
}

TrainingData open_training_data(const TrainConfig& config, const ModelSource& source) {
  TrainingData data;
  if (config.mix.empty()) {
    data.sources.push_back(open_tokens(config.data, config, source));
    data.names = {"--data"};
    data.shares = {1.0};
    return data;
  }
  double weights = 0.0;
  for (const MixEntry& entry : config.mix) weights += entry.weight;
  for (const MixEntry& entry : config.mix) {
    data.sources.push_back(open_tokens({entry.path}, config, source, "--mix"));
    require_alike(*data.sources.front(), *data.sources.back(), entry.path);
    data.names.push_back(fmt::format("--mix {}", entry.path));
    data.shares.push_back(entry.weight / weights);
  }
  return data;
}

std::int64_t sequence_length(const TrainConfig& config, const ModelConfig& model, const TokenSource& data) {
  if (config.seq_len != 0 || data.layout() == TokenLayout::stream) return sequence_length(config, model);
  const std::int64_t length = data.row_length() - 1;
  if (length > model.positions) {
    throw InputError("data in rows",
                     fmt::format("a row feeds {} tokens, {} has {} positions", length, model.name, model.positions),
                     fmt::format("prepare it with --row-length {}", model.positions + 1));
  }
  return length;
}

}  // namespace tandem
