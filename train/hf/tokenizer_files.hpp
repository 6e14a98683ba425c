#pragma once
// Files beside a model's weights that others need: of the tokenizer, chat templates, the generation config.
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "io/checkpoint.hpp"

namespace tandem {

/// Those in a Hugging Face folder, by the names that transformers gives them. A named chat template, which lies in a
/// folder of its own, gets a name without one: "additional_chat_templates.NAME.jinja".
std::vector<FileBeside> files_beside_weights(const std::filesystem::path& folder);

/// Where a file of that name in a checkpoint belongs in a Hugging Face folder.
std::filesystem::path place_in_folder(std::string_view name);

}  // namespace tandem
