#include "train/hf/model_names.hpp"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <fstream>
#include <numeric>
#include <system_error>

#include "models/config/config.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;

bool is_letter_or_digit(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0; }

/// Letters and digits alone, in lower case.
std::string plain(std::string_view name) {
  std::string text;
  for (const char c : name) {
    if (is_letter_or_digit(c)) text += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return text;
}

/// Letters to insert, remove or replace to make one of the other.
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i + 1;
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? std::string() : value;
}

/// A path that may begin with "~/", as the hub's own programs take it.
fs::path of_home(const std::string& path) {
  return path.starts_with("~/") ? fs::path(variable("HOME")) / path.substr(2) : fs::path(path);
}

}  // namespace

std::vector<std::string> nearest_names(std::string_view name, const std::vector<std::string>& among) {
  constexpr std::size_t most = 3, shortest_prefix = 4;
  const std::string typed = plain(name);
  std::vector<std::pair<std::size_t, std::string>> near;
  for (const std::string& candidate : among) {
    const std::string known = plain(candidate);
    const std::size_t apart = distance(typed, known);
    const bool is_beginning = typed.size() >= shortest_prefix && known.starts_with(typed);
    if (is_beginning || apart <= std::max<std::size_t>(1, known.size() / 4)) near.emplace_back(apart, candidate);
  }
  std::ranges::stable_sort(near, {}, &std::pair<std::size_t, std::string>::first);
  std::vector<std::string> names;
  for (std::size_t i = 0; i < std::min(most, near.size()); ++i) names.push_back(near[i].second);
  return names;
}

std::vector<std::string> nearest_shapes(std::string_view name) { return nearest_names(name, builtin_models()); }

std::vector<std::string> nearest_folders(const fs::path& missing) {
  const fs::path path = missing.has_filename() ? missing : missing.parent_path();  // also where it ends in a slash
  const fs::path parent = path.parent_path();
  std::vector<std::string> folders;
  std::error_code error;
  for (fs::directory_iterator it(parent.empty() ? "." : parent, error), end; !error && it != end; it.increment(error)) {
    std::error_code ignored;
    if (it->is_directory(ignored)) folders.push_back(it->path().filename().string());
  }
  std::ranges::sort(folders);
  std::vector<std::string> near = nearest_names(path.filename().string(), folders);
  for (std::string& name : near) name = (parent / name).string();
  return near;
}

bool is_hub_name(std::string_view name) {
  const auto slash = std::ranges::find(name, '/');
  const auto is_part = [](std::string_view part) {
    return !part.empty() && is_letter_or_digit(part.front()) &&
           std::ranges::all_of(part, [](char c) { return is_letter_or_digit(c) || c == '-' || c == '_' || c == '.'; });
  };
  return slash != name.end() && is_part({name.begin(), slash}) && is_part({slash + 1, name.end()});
}

fs::path hub_cache() {
  for (const char* name : {"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"}) {
    if (const std::string folder = variable(name); !folder.empty()) return of_home(folder);
  }
  if (const std::string home = variable("HF_HOME"); !home.empty()) return of_home(home) / "hub";
  const std::string cache = variable("XDG_CACHE_HOME");
  return (cache.empty() ? fs::path(variable("HOME")) / ".cache" : fs::path(cache)) / "huggingface" / "hub";
}

std::optional<fs::path> cached_snapshot(std::string_view name) {
  if (!is_hub_name(name)) return std::nullopt;
  std::string folder = "models--";
  for (const char c : name) folder += c == '/' ? std::string("--") : std::string(1, c);
  const fs::path root = hub_cache() / folder;
  std::ifstream in(root / "refs" / "main");
  std::string revision;
  in >> revision;
  const bool is_plain = !revision.empty() && std::ranges::all_of(revision, is_letter_or_digit);
  std::error_code ignored;
  const fs::path snapshot = root / "snapshots" / revision;
  if (!is_plain || !fs::is_directory(snapshot, ignored)) return std::nullopt;
  return snapshot;
}

}  // namespace tandem
