#include "train/loop/run_paths.hpp"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "core/base/utf8.hpp"
#include "models/config/config.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;

/// Path without dots. Behind a link, `..` is another folder than the one that its spelling names: such a path keeps its
/// spelling.
fs::path without_dots(const fs::path& path) {
  const bool climbs = std::ranges::find(path, fs::path("..")) != path.end();
  return climbs ? path : path.lexically_normal();
}

void make_absolute(std::string& path) {
  if (path.empty()) return;
  std::error_code error;
  const fs::path absolute = fs::absolute(path, error);
  if (!error && is_utf8(absolute.string())) path = without_dots(absolute).string();
}

bool is_path(const std::string& model) {
  const auto shapes = builtin_models();
  std::error_code ignored;
  return std::ranges::find(shapes, model) == shapes.end() && fs::exists(model, ignored);
}

}  // namespace

std::string absolute_path(std::string model) {
  if (is_path(model)) make_absolute(model);
  return model;
}

TrainConfig with_absolute_paths(TrainConfig config) {
  config.model = absolute_path(config.model);
  for (std::string& path : config.data) make_absolute(path);
  for (MixEntry& entry : config.mix) make_absolute(entry.path);
  for (std::string& path : config.eval_data) make_absolute(path);
  for (std::string* path : {&config.out, &config.trace, &config.state_dir, &config.adapter}) make_absolute(*path);
  return config;
}

}  // namespace tandem
