#include "train/setup/training_data.hpp"

#include <fmt/format.h>

#include "core/base/error.hpp"
#include "train/setup/run_request.hpp"

namespace tandem {

std::unique_ptr<TokenSource> open_tokens(const std::vector<std::string>& names, const TrainConfig& config,
                                         const ModelSource& source, std::string_view flag) {
  auto data = std::make_unique<TokenSource>(std::vector<std::filesystem::path>(names.begin(), names.end()),
                                            TokenSourceOptions{source.config.vocabulary, config.token_dtype});
  if (data->bytes() && source.loads_weights() && !source.bytes) {
    throw UsageError(flag, "text would be fed as bytes to a model whose weights expect its own tokens",
                     "make token files with tools/prepare_data.py, or train with --from-scratch");
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
