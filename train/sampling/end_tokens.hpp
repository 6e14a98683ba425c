#pragma once
// Tokens that end a text, as the files beside a model name them.
#include <cstdint>
#include <vector>

#include "train/hf/model_source.hpp"

namespace tandem {

/// Ids that generation_config.json (else config.json) names as eos_token_id, and the eos_token of
/// tokenizer_config.json, as far as they are below the vocabulary; in rising order, none where no file names one. Files
/// that are not JSON, and what is no such id, are passed over with a warning that names them.
std::vector<std::int32_t> end_tokens(const ModelSource& source);

}  // namespace tandem
