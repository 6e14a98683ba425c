#pragma once
// Files beside a model's weights that others need: of the tokenizer, chat templates, the generation config.
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "io/checkpoint.hpp"

namespace tandem {

/// Files of a tokenizer in a Hugging Face folder, by the names that transformers gives them. A named chat template,
/// which lies in a folder of its own, gets a name without one: "additional_chat_templates.NAME.jinja".
std::vector<FileBeside> files_beside_weights(const std::filesystem::path& folder);

/// Path in a Hugging Face folder of a file that has this name in a checkpoint.
std::filesystem::path place_in_folder(std::string_view name);

}  // namespace tandem
