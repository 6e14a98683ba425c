// tandem train
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <filesystem>
#include <memory>

#include "cli/commands.hpp"
#include "cli/flags.hpp"
#include "core/base/error.hpp"
#include "models/config/config.hpp"
#include "train/hf/model_names.hpp"
#include "train/loop/trainer.hpp"
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

/// `--resume` where nothing says what to train.
void refuse_without_run(const std::string& out) {
  if (out.empty()) throw UsageError("--resume", "there is no --out to resume", "give the --out of a run");
  throw UsageError("--resume", fmt::format("--out {} holds no run, which would say what to train", out),
                   "name the folder of a run, or give --model and --data too");
}

/// Relative paths of a run are those of the folder where it began: nobody typed them here.
void refuse_lost_paths(const ConfigFlags& flags, const TrainConfig& config, const std::string& base) {
  const auto check = [&](const std::string& flag, const std::string& name) {
    std::error_code ignored;
    if (flags.given(flag) || std::filesystem::path(name).is_absolute() || std::filesystem::exists(name, ignored))
      return;
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

int train(const TrainFlags& flags, const ProgramContext& context) {
  TrainRequest request;
  request.resume = flags.resume->count() > 0;
  request.resume_from = flags.resume_from;
  request.dry_run = flags.dry_run;
  request.quiet = flags.quiet;
  request.command = context.command_line;
  const std::string out = flags.config.out();
  const std::string base = request.resume && !out.empty() ? out + "/config.toml" : "";
  request.config = flags.config.config(base);
  if (request.resume && request.config.model.empty()) refuse_without_run(out);
  if (!base.empty() && !flags.config.config_file_given()) refuse_lost_paths(flags.config, request.config, base);
  if (flags.quiet && request.config.metrics_port == 0) {
    throw UsageError("--metrics-port 0", "with --quiet nobody would learn the port", "name one");
  }
  if (flags.quiet && spdlog::get_level() < spdlog::level::warn) spdlog::set_level(spdlog::level::warn);
  Trainer trainer(std::move(request));
  if (flags.dry_run) {
    print_output(trainer.plan_text());
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
                                   "goes on from the newest good checkpoint in --out, or from the one named; takes "
                                   "OUT/config.toml where no --config is given. Example: --resume")
                      ->type_name("[DIR]")
                      ->expected(0, 1);
  command->add_flag("--dry-run", flags->dry_run, "checks everything and prints the plan; trains nothing. Default: off");
  command->add_flag("--quiet", flags->quiet, "prints errors and warnings alone. Default: off");
  command->footer("Example: tandem train --model tiny-gpt2 --data corpus/ --steps 200 --out runs/first");
  return [flags](const ProgramContext& context) { return train(*flags, context); };
}

}  // namespace tandem
