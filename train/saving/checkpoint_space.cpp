#include "train/saving/checkpoint_space.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <system_error>

#include "core/base/error.hpp"
#include "core/memory/memory.hpp"
#include "io/checkpoint.hpp"
#include "offload/engine/state_io.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;
constexpr std::int64_t many = std::numeric_limits<std::int64_t>::max();

/// Saves of the whole run, at most: the best ones are known when they are there.
std::int64_t saves_of(const TrainConfig& config) {
  const auto every = [&](std::int64_t steps) {
    if (steps == 0) return std::int64_t{0};
    return config.steps == 0 ? many / 4 : config.steps / steps;
  };
  const std::int64_t periodic = every(config.checkpoint_every);
  const bool ends_with_one =
      config.checkpoint_every > 0 && config.steps > 0 && config.steps % config.checkpoint_every == 0;
  return periodic + (ends_with_one ? 0 : 1) + (config.keep_best ? every(config.eval_every) : 0);
}

/// The folder, or the nearest above it that is there.
fs::path existing(const fs::path& folder) {
  std::error_code error;
  fs::path found = fs::absolute(folder, error);
  while (!found.empty() && found.has_relative_path() && !fs::exists(found, error)) found = found.parent_path();
  return found;
}

std::int64_t checkpoints_in(const fs::path& root) {
  std::error_code error;
  std::int64_t count = 0;
  for (fs::directory_iterator it(root, error), end; !error && it != end; it.increment(error)) {
    if (is_checkpoint(it->path())) ++count;
  }
  return count;
}

}  // namespace

std::size_t CheckpointSpace::needed() const noexcept {
  return bytes * static_cast<std::size_t>(std::max<std::int64_t>(1, at_once - there));
}

std::string CheckpointSpace::text() const {
  std::string text = format_bytes(bytes);
  if (at_once == 0) text += " each, and every one is kept";
  if (at_once > 1) text += fmt::format(" each, {} at once at most", at_once);
  if (available) text += fmt::format("; {} free in {}", format_bytes(*available), folder.string());
  if (available && needed() > *available) text += ", too little";
  return text;
}

void CheckpointSpace::require(OnSaveFailure on_failure) const {
  if (!available) return;
  const std::size_t wanted = on_failure == OnSaveFailure::stop ? needed() : bytes;
  if (wanted <= *available) return;
  const bool several = *available >= bytes;
  throw WriteError(
      fmt::format("--out {}", folder.string()),
      several
          ? fmt::format("its checkpoints need {} more, and {} are free", format_bytes(wanted), format_bytes(*available))
          : fmt::format("a checkpoint needs {}, and {} are free", format_bytes(bytes), format_bytes(*available)),
      several ? "make room, keep fewer (--keep 1), or name a folder on another disk"
              : "make room, or name a folder on another disk");
}

CheckpointSpace checkpoint_space(const TrainConfig& config, const ParameterLayout& layout, SavedState saved) {
  constexpr std::size_t described = 1024;  // bytes of a parameter's lines in manifest and header, about
  CheckpointSpace space;
  space.bytes =
      StateCopy::bytes(layout, optimizer_of(config.state), saved) + described * layout.owned_parameters().size();
  const std::int64_t saves = saves_of(config);
  const std::int64_t kept = std::int64_t{config.keep} + 1 + (config.keep_best ? 1 : 0);  // the new one beside the old
  space.at_once = config.keep > 0 ? std::min(saves, kept) : (saves > 1 ? 0 : 1);
  return space;
}

void look_at_disk(CheckpointSpace& space, const std::string& out) {
  if (out.empty()) return;
  space.folder = out;
  std::error_code error;
  const fs::space_info info = fs::space(existing(out), error);
  if (!error) space.available = info.available;
  space.there = checkpoints_in(fs::path(out) / "checkpoints");
}

}  // namespace tandem
