#include "train/report/run_directory.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>
#include <system_error>

#include "core/base/error.hpp"
#include "core/base/json_text.hpp"
#include "io/atomic_file.hpp"
#include "train/report/next_commands.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;
constexpr const char* config_name = "config.toml";
constexpr const char* metrics_name = "metrics.jsonl";
constexpr const char* summary_name = "summary.json";
constexpr const char* commands_name = "commands.jsonl";
constexpr const char* lock_name = ".lock";

[[noreturn]] void refuse_taken(const fs::path& out) {
  throw WriteError(fmt::format("--out {}", out.string()), "another process is writing this run",
                   "wait for it, or name another folder");
}

/// Whether the open file is the one of that name.
bool is_at(int fd, const fs::path& file) {
  struct stat open {};
  struct stat named {};
  return ::fstat(fd, &open) == 0 && ::stat(file.c_str(), &named) == 0 && open.st_dev == named.st_dev &&
         open.st_ino == named.st_ino;
}

nlohmann::ordered_json finite(double value) {
  return std::isfinite(value) ? nlohmann::ordered_json(value) : nlohmann::ordered_json(nullptr);
}

std::string text_of(const fs::path& name) {
  std::ifstream file(name, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// The command in an object that keeps one with its step under `step_key`; empty where it has none.
std::optional<RunCommand> command_in(const nlohmann::json& json, const char* step_key) {
  if (!json.is_object() || !json.contains("command") || !json["command"].is_string()) return std::nullopt;
  const bool has_step = json.contains(step_key) && json[step_key].is_number_integer();
  return RunCommand{has_step ? json[step_key].get<std::int64_t>() : 0, json["command"].get<std::string>()};
}

}  // namespace

std::vector<RunCommand> commands_of(const fs::path& run) {
  std::vector<RunCommand> commands;
  std::ifstream file(run / commands_name);
  for (std::string line; std::getline(file, line);) {
    if (auto command = command_in(parse_json<nlohmann::json>(line), "step")) commands.push_back(std::move(*command));
  }
  if (!commands.empty()) return commands;
  const auto summary = parse_json<nlohmann::json>(text_of(run / summary_name));
  if (auto command = command_in(summary, "resumed_from_step")) commands.push_back(std::move(*command));
  return commands;
}

bool holds_run(const fs::path& out) {
  std::error_code ignored;
  for (const char* name : {config_name, metrics_name, summary_name, "checkpoints"}) {
    if (fs::exists(out / name, ignored)) return true;
  }
  return false;
}

void refuse_held(const fs::path& out) {
  if (!holds_run(out)) return;
  throw UsageError(
      fmt::format("--out {}", out.string()), "it already holds a run",
      fmt::format("train --resume {} goes on with it; else name another folder", shell_word(out.string())));
}

std::string StepMetrics::json() const {
  nlohmann::ordered_json j{{"step", step},
                           {"loss", finite(loss)},
                           {"grad_norm", finite(grad_norm)},
                           {"lr", lr},
                           {"step_seconds", finite(step_seconds)},
                           {"tokens_per_second", finite(tokens_per_second)},
                           {"bound_by", use.bound_by},
                           {"exposed_update_seconds", exposed_update_seconds},
                           {"h2d_bytes", use.h2d_bytes},
                           {"d2h_bytes", use.d2h_bytes},
                           {"file_read_bytes", use.file_read_bytes},
                           {"file_write_bytes", use.file_write_bytes},
                           {"h2d_bytes_per_second", finite(use.h2d_bytes_per_second)},
                           {"d2h_bytes_per_second", finite(use.d2h_bytes_per_second)},
                           {"dram_bytes_per_second", finite(use.dram_bytes_per_second)},
                           {"device_bytes", device_bytes},
                           {"skipped", skipped},
                           {"speculated_parameters", speculated_parameters},
                           {"speculation", speculation.empty() ? nlohmann::ordered_json() : speculation}};
  if (pairs) j["reward_margin"] = finite(pairs->margin), j["reward_accuracy"] = finite(pairs->accuracy);
  if (eval_loss) j["eval_loss"] = finite(*eval_loss);
  if (eval_pairs) {
    j["eval_reward_margin"] = finite(eval_pairs->margin);
    j["eval_reward_accuracy"] = finite(eval_pairs->accuracy);
  }
  return json_text(j);
}

void refuse_locked(const fs::path& out) {
  const int fd = ::open((out / lock_name).c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return;  // nobody has ever locked it
  const bool taken = ::flock(fd, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  ::close(fd);
  if (taken) refuse_taken(out);
}

RunDirectory::RunDirectory(fs::path out, bool fresh) : out_(std::move(out)) {
  std::error_code ignored;
  for (fs::path folder = out_; !folder.empty() && !fs::exists(folder, ignored); folder = folder.parent_path()) {
    made_.push_back(folder);
  }
  try {
    create_directories_or_throw(out_);
    lock();
    if (fresh) refuse_held(out_);
  } catch (const Error&) {
    close();
    throw;
  }
}

RunDirectory::~RunDirectory() { close(); }

void RunDirectory::lock() {
  const fs::path file = out_ / lock_name;
  constexpr int flags = O_RDWR | O_CREAT | O_CLOEXEC;
  do {
    if (lock_ >= 0) ::close(lock_);
    lock_ = ::open(file.c_str(), flags | O_EXCL, 0644);
    const bool made = lock_ >= 0;
    if (!made && errno == EEXIST) lock_ = ::open(file.c_str(), flags, 0644);
    if (lock_ < 0) {
      throw WriteError(fmt::format("cannot write --out {}", out_.string()), std::generic_category().message(errno),
                       "name a folder that may be written");
    }
    if (::flock(lock_, LOCK_EX | LOCK_NB) != 0) refuse_taken(out_);
    made_lock_ = made;
  } while (!is_at(lock_, file));  // else a run that was refused has just removed it, and the next would make another
}

void RunDirectory::close() noexcept {
  if (!begun_ && made_lock_) ::unlink((out_ / lock_name).c_str());
  for (const fs::path& folder : made_) {
    if (!begun_) ::rmdir(folder.c_str());  // fails, and so keeps the folder, where anything lies in it
  }
  if (lock_ >= 0) ::close(lock_);
}

bool RunDirectory::has_config() const {
  std::error_code ignored;
  return fs::exists(out_ / config_name, ignored);
}

std::string RunDirectory::summary() const { return text_of(out_ / summary_name); }

void RunDirectory::add_command(std::int64_t step, const std::string& command, bool fresh) {
  std::vector<RunCommand> commands = fresh ? std::vector<RunCommand>() : commands_of(out_);
  commands.push_back({step, command});
  std::string lines;
  for (const RunCommand& each : commands)
    lines += json_text(nlohmann::ordered_json{{"step", each.step}, {"command", each.command}}) + "\n";
  write_file_atomically(out_ / commands_name, lines);
}

void RunDirectory::write_config(const std::string& toml) { write_file_atomically(out_ / config_name, toml); }
void RunDirectory::write_summary(const std::string& json) { write_file_atomically(out_ / summary_name, json); }

void RunDirectory::remove_summary() noexcept {
  std::error_code ignored;
  fs::remove(out_ / summary_name, ignored);
}

void RunDirectory::open_metrics(std::int64_t step) {
  std::string kept;
  std::ifstream old(out_ / metrics_name);
  for (std::string line; std::getline(old, line);) {
    const auto json = parse_json<nlohmann::json>(line);
    if (!json.is_object() || !json.contains("step") || !json["step"].is_number_integer()) continue;  // torn last line
    if (json["step"].get<std::int64_t>() <= step) kept += line + "\n";
  }
  old.close();
  write_file_atomically(out_ / metrics_name, kept);
  metrics_.open(out_ / metrics_name, std::ios::app);
  begun_ = true;
}

void RunDirectory::append(const StepMetrics& metrics) {
  metrics_ << metrics.json() << '\n' << std::flush;
  if (!metrics_) {
    throw WriteError(fmt::format("cannot write {}", (out_ / metrics_name).string()), "the disk refused a line",
                     "check the free space");
  }
}

}  // namespace tandem
