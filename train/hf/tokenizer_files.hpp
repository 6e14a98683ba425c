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

/// Files of a base, and in their place those in the folder of its adapter. A tokenizer there replaces all of the base's.
std::vector<FileBeside> files_with_adapter(std::vector<FileBeside> base, const std::filesystem::path& adapter);

/// Path in a Hugging Face folder of a file that has this name in a checkpoint.
std::filesystem::path place_in_folder(std::string_view name);

}  // namespace tandem
