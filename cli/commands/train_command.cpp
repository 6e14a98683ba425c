// tandem train
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <filesystem>
#include <memory>

#include "cli/common/commands.hpp"
#include "cli/common/flags.hpp"
#include "cli/common/launch_environment.hpp"
#include "core/base/error.hpp"
#include "core/device/device_name.hpp"
#include "io/checkpoint.hpp"
#include "models/config/config.hpp"
#include "train/hf/model_names.hpp"
#include "train/loop/trainer.hpp"
#include "train/report/next_commands.hpp"
#include "train/report/run_directory.hpp"
#include "train/runtime/stop_signal.hpp"

namespace tandem {
namespace {

struct TrainFlags {
  ConfigFlags config;
  std::string resume_from;
  CLI::Option* resume = nullptr;
  bool dry_run = false;
  bool quiet = false;
};

namespace fs = std::filesystem;

/// Folder of the run that holds a checkpoint; empty where it lies in none.
fs::path run_of(const fs::path& checkpoint) {
  const fs::path folder = (checkpoint / "").parent_path().parent_path();  // also where the name ends in a slash
  return is_checkpoint(checkpoint) && folder.filename() == "checkpoints" ? folder.parent_path() : fs::path();
}

/// `--resume` where nothing says what to train.
void refuse_without_run(const std::string& named, const std::string& out) {
  std::error_code ignored;
  if (!named.empty() && !fs::exists(named, ignored)) {
    throw InputError(fmt::format("--resume {}", named), "there is no such folder", "name the folder of a run");
  }
  if (const fs::path run = run_of(named); out.empty() && !run.empty()) {
    throw UsageError(fmt::format("--resume {}", named), "a checkpoint, and there is no --out to go on in",
                     fmt::format("--resume {0} goes on from the newest; with --out {0} it goes on from this one, and "
                                 "later ones are removed",
                                 shell_word(run.string())));
  }
  if (out.empty()) {
    throw UsageError("--resume", named.empty() ? "there is no --out to resume" : "it names no run",
                     "name the folder of a run, for example --resume runs/first");
  }
  throw UsageError("--resume", fmt::format("--out {} holds no run, which would say what to train", out),
                   "name the folder of a run, or give --model and --data too");
}

/// Throws UsageError where a path of the run is not there: its model, which may have moved, or a relative one, which
/// older versions kept as typed and is one from the folder where the run began.
void refuse_lost_paths(const ConfigFlags& flags, const TrainConfig& config, const std::string& base) {
  const auto check = [&](const std::string& flag, const std::string& name) {
    std::error_code ignored;
    if (flags.given(flag) || fs::exists(name, ignored)) return;
    const bool absolute = fs::path(name).is_absolute();
    if (absolute && flag == "model") {
      throw UsageError(fmt::format("{}: --{} {}", base, flag, name), "it is not there any more",
                       "put it back, or say by --model DIR where it is now");
    }
    if (absolute) return;
    throw UsageError(fmt::format("{}: --{} {}", base, flag, name),
                     "there is none here; a relative path is one from the folder where the run began",
                     fmt::format("go there, or give --{}", flag));
  };
  const std::vector<std::string> shapes = builtin_models();
  const bool is_shape = std::ranges::find(shapes, config.model) != shapes.end();
  if (!is_shape && !cached_snapshot(config.model)) check("model", config.model);
  for (const std::string& name : config.data) check("data", name);
  for (const MixEntry& entry : config.mix) check("mix", entry.path);
  for (const std::string& name : config.eval_data) check("eval-data", name);
  if (!config.state_dir.empty()) check("state-dir", config.state_dir);
}

/// Folder of the run that is resumed: --out, or what --resume names; empty where it is neither.
std::string run_to_resume(const TrainFlags& flags) {
  if (flags.resume->count() == 0) return {};
  const std::string out = flags.config.out();
  if (!out.empty() || is_checkpoint(flags.resume_from) || !holds_run(flags.resume_from)) return out;
  return flags.resume_from;
}

/// The run that --resume names is --out too, unless the file of --config has one.
void go_on_in(const std::string& run, const TrainFlags& flags, TrainRequest& request) {
  if (flags.config.config_file_given() && !request.config.out.empty()) return;
  request.config.out = run;
  request.resume_from.clear();
}

/// Throws UsageError where a run that goes on, with the adapter that its checkpoints hold, is given another.
void require_its_own_adapter(const TrainConfig& config, const std::string& file_of_run) {
  if (!fs::exists(file_of_run)) return;
  TrainConfig of_run;
  read_config_toml(file_of_run, of_run);
  if (config.adapter.empty() || config.adapter == of_run.adapter) return;
  throw UsageError(fmt::format("--adapter {}", config.adapter), "a run that is resumed goes on with its own",
                   "leave it out, or leave out --resume and give another --out");
}

/// A run of several devices goes on in several processes with one of their kind each, unless --device says otherwise.
void take_a_device_each(TrainConfig& config, const LaunchFacts& launch) {
  const std::vector<std::string> names = split_device_names(config.device);
  if (names.size() == 1) return;
  const char* const kind = parse_device_name(names.front()).kind == DeviceName::Kind::host ? "host" : "cuda";
  if (launch.rank.index == 0) {
    spdlog::info("--device {}: the run had --device {}, and goes on in {} processes, which take a device each", kind,
                 config.device, launch.rank.count);
  }
  config.device = kind;
}

int train(const TrainFlags& flags, const ProgramContext& context) {
  TrainRequest request;
  request.resume = flags.resume->count() > 0;
  request.resume_from = flags.resume_from;
  request.dry_run = flags.dry_run;
  request.quiet = flags.quiet;
  request.program = context.program;
  request.command = context.command_line;
  request.launch = launch_of_environment();
  const std::string run = run_to_resume(flags);
  const std::string base = run.empty() ? "" : run + "/config.toml";
  request.config = flags.config.config(base);
  if (!run.empty() && flags.config.out().empty()) go_on_in(run, flags, request);
  const bool has_devices_of_run = !base.empty() && !flags.config.config_file_given() && !flags.config.given("device");
  if (request.launch && has_devices_of_run) take_a_device_each(request.config, *request.launch);
  if (request.resume && request.config.model.empty()) refuse_without_run(flags.resume_from, run);
  if (request.resume && !base.empty()) require_its_own_adapter(request.config, base);
  if (!base.empty() && !flags.config.config_file_given()) refuse_lost_paths(flags.config, request.config, base);
  if (flags.quiet && request.config.metrics_port == 0) {
    throw UsageError("--metrics-port 0", "with --quiet nobody would learn the port", "name one");
  }
  if (flags.quiet && spdlog::get_level() < spdlog::level::warn) spdlog::set_level(spdlog::level::warn);
  Trainer trainer(std::move(request));
  if (flags.dry_run) {
    if (trainer.speaks()) print_output(trainer.plan_text());
    return 0;
  }
  const int signal = trainer.run();
  return signal == 0 ? 0 : exit_code_of(signal);
}

}  // namespace

CommandFunction add_train_command(CLI::App& program) {
  auto* command = program.add_subcommand("train", "trains or fine-tunes a model");
  auto flags = std::make_shared<TrainFlags>();
  flags->config.add_to(*command);
  flags->resume = command
                      ->add_option("--resume", flags->resume_from,
                                   "goes on with the run that is named, or that of --out, from its newest good "
                                   "checkpoint, or from the checkpoint that is named; takes the run's config.toml "
                                   "where no --config is given. Example: --resume runs/first")
                      ->type_name("[DIR]")
                      ->expected(0, 1);
  command->add_flag("--dry-run", flags->dry_run, "checks everything and prints the plan; trains nothing. Default: off");
  command->add_flag("--quiet", flags->quiet, "prints errors and warnings alone. Default: off");
  command->footer("Example: tandem train --model tiny-gpt2 --data corpus/ --steps 200 --out runs/first");
  return [flags](const ProgramContext& context) { return train(*flags, context); };
}

}  // namespace tandem
