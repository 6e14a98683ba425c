#include "train/hf/tokenizer_files.hpp"

#include <algorithm>
#include <array>
#include <iterator>
#include <system_error>

namespace tandem {
namespace {

namespace fs = std::filesystem;

constexpr std::array names{"tokenizer.json",      "tokenizer_config.json",
                           "tokenizer.model",     "special_tokens_map.json",
                           "added_tokens.json",   "vocab.json",
                           "vocab.txt",           "merges.txt",
                           "spiece.model",        "sentencepiece.bpe.model",
                           "tekken.json",         "chat_template.json",
                           "chat_template.jinja", "generation_config.json"};
constexpr std::string_view named_templates = "additional_chat_templates";
constexpr std::string_view ending = ".jinja";

}  // namespace

std::vector<FileBeside> files_beside_weights(const fs::path& folder) {
  std::vector<FileBeside> found;
  std::error_code ignored;
  for (const char* name : names) {
    if (fs::is_regular_file(folder / name, ignored)) found.emplace_back(folder / name);
  }
  std::vector<fs::path> templates;
  std::error_code error;
  for (fs::directory_iterator it(folder / named_templates, error), end; !error && it != end; it.increment(error)) {
    if (it->path().extension() == ending && fs::is_regular_file(it->path(), ignored)) templates.push_back(it->path());
  }
  std::ranges::sort(templates);
  for (const fs::path& file : templates) {
    found.emplace_back(file, std::string(named_templates) + "." + file.filename().string());
  }
  return found;
}

std::vector<FileBeside> files_with_adapter(std::vector<FileBeside> base, const fs::path& adapter) {
  std::vector<FileBeside> files = files_beside_weights(adapter);
  const auto has = [&](std::string_view name) { return std::ranges::count(files, name, &FileBeside::name) > 0; };
  const bool tokenizer = has("tokenizer.json");
  std::erase_if(base, [&](const FileBeside& file) {
    return has(file.name) || (tokenizer && file.name != "generation_config.json");
  });
  std::ranges::copy(files, std::back_inserter(base));
  return base;
}

fs::path place_in_folder(std::string_view name) {
  const std::string_view rest = name.starts_with(named_templates) ? name.substr(named_templates.size()) : "";
  if (rest.size() > ending.size() + 1 && rest.front() == '.' && rest.ends_with(ending)) {
    return fs::path(named_templates) / rest.substr(1);
  }
  return fs::path(name);
}

}  // namespace tandem
