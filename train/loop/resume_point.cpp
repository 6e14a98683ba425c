#include "train/loop/resume_point.hpp"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <string>
#include <system_error>

#include "core/base/error.hpp"

namespace tandem {

namespace fs = std::filesystem;

bool names_a_checkpoint(const TrainRequest& request) {
  const fs::path named = request.resume_from;
  return !named.empty() && (is_checkpoint(named) || !fs::is_directory(named / "checkpoints"));
}

namespace {

/// Folder of the run whose newest checkpoint is asked for.
fs::path checkpoints_of(const TrainRequest& request) {
  const std::string& run = request.resume_from.empty() ? request.config.out : request.resume_from;
  return fs::path(run) / "checkpoints";
}

}  // namespace

std::unique_ptr<Checkpoint> open_chosen(const TrainRequest& request, const std::string& name) {
  const fs::path chosen = names_a_checkpoint(request) ? fs::path(request.resume_from) : checkpoints_of(request) / name;
  return std::make_unique<Checkpoint>(chosen, CheckpointCheck::all_but_state);
}

std::unique_ptr<Checkpoint> find_checkpoint(const TrainRequest& request, std::int64_t before) {
  if (!request.resume) return nullptr;
  if (names_a_checkpoint(request)) {
    return std::make_unique<Checkpoint>(request.resume_from, CheckpointCheck::all_but_state);
  }
  const fs::path root = checkpoints_of(request);
  bool passed_over = before != std::numeric_limits<std::int64_t>::max();
  const auto pass_over = [&](const fs::path&, const std::string& why) {
    passed_over = true;
    spdlog::warn("passed over: {}", why);
  };
  auto checkpoint = newest_checkpoint(root, pass_over, {.check = CheckpointCheck::all_but_state, .before = before});
  if (checkpoint) return checkpoint;
  if (request.config.strict)
    throw InputError("--resume", fmt::format("no good checkpoint in {}", root.string()),
                     "leave out --strict to start fresh");
  spdlog::warn("no {}checkpoint in {}: the run starts fresh", passed_over ? "good " : "", root.string());
  return nullptr;
}

bool has_later_checkpoints(const fs::path& root, std::int64_t step) {
  const std::string resumed = checkpoint_name(step);
  std::error_code error;
  for (fs::directory_iterator it(root, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.starts_with("step-") && name.size() >= resumed.size() && name > resumed) return true;
  }
  return false;
}

}  // namespace tandem
