#include "cli/bench/bench_modules.hpp"

#include <fmt/format.h>

#include <filesystem>
#include <utility>

#include "api/open_device.hpp"
#include "cli/bench/bench_machine.hpp"
#include "cli/bench/bench_steps.hpp"
#include "cli/common/commands.hpp"
#include "cli/common/shipped_profiles.hpp"
#include "cli/common/step_modules.hpp"
#include "core/base/json_text.hpp"
#include "core/base/version.hpp"
#include "io/atomic_file.hpp"
#include "train/runtime/stop_signal.hpp"
#include "train/setup/performance.hpp"
#include "train/setup/profile_machine.hpp"
#include "train/setup/run_setup.hpp"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

/// A step and what it is of.
struct Watched {
  std::string machine, resolved, activations;
  StepModules step;
  std::string state_digest{};  ///< after all steps; empty where none was executed
};

Watched watched_of(std::string machine, const RunPlan& run, StepModules step) {
  return {std::move(machine), run.plan.policy.text(), activations_of(run.model_config, run.shape), std::move(step)};
}

Watched predict(const ModulesRequest& request) {
  const MachineProfile profile = find_profile(request.profile);
  const ProfileMachine elsewhere = machine_of(profile, request.config);
  const RunPlan run = plan_run(request.config, request.source.config, {.training = true}, elsewhere.machine);
  return watched_of(fmt::format("{}, simulated", profile.name), run, step_modules(run, {}));
}

Watched execute(const ModulesRequest& request) {
  const TrainConfig& config = request.config;
  MachineProfile profile;
  {
    const auto device = open_device(config.device, device_options(config));
    profile = calibrated(*device, config, trained_layout(config, request.source.config));
  }
  const std::string machine = fmt::format("{}, {}", profile.cpu.empty() ? "CPU unknown" : profile.cpu, profile.device);
  profile = as_emulated(std::move(profile), config);
  RunSetup run = set_up_run(config, request.source.config, {.training = true}, {.profile = &profile});
  Trace trace;
  BenchSteps steps(run, config, request.source, &trace);
  say("measuring modules");
  Watched watched = watched_of(machine, run, step_modules(run, {}, steps.measure_modules(request.steps, trace)));
  watched.state_digest = steps.engine().state_digest();
  return watched;
}

Json json_of(const ModulesRequest& request, const Watched& watched) {
  const TrainConfig& c = request.config;
  Json json{{"machine", watched.machine},         {"model", request.source.config.name},
            {"command", request.command},         {"version", version},
            {"policy", c.policy.text()},          {"resolved", watched.resolved},
            {"activations", watched.activations}, {"tokens_per_step", c.micro_batch * c.grad_accum * c.seq_len}};
  json.update(json_of(watched.step));
  json["state_digest"] = watched.state_digest.empty() ? Json(nullptr) : Json(watched.state_digest);
  return json;
}

}  // namespace

int bench_modules(ModulesRequest request) {
  namespace fs = std::filesystem;
  // Makes the folder before anything takes long, and removes it on a refusal, so that the next try does not meet it.
  Unfinished made(request.out.empty() || fs::exists(request.out) ? fs::path() : fs::path(request.out));
  if (!request.out.empty()) create_directories_or_throw(request.out);
  Watched watched;
  try {
    watched = request.profile.empty() ? execute(request) : predict(request);
  } catch (const BenchInterrupted&) {
    say("interrupted before there was anything to report");
    return exit_code_of(StopSignal::received());
  }
  const std::string json = json_document(json_of(request, watched));
  if (!request.out.empty()) write_file_atomically(fs::path(request.out) / "modules.json", json);
  made.keep();
  print_output(request.json
                   ? json
                   : fmt::format("{}, {}, policy {}, activations {}\n{}", request.source.config.name, watched.machine,
                                 watched.resolved, watched.activations, table_of(watched.step)));
  return 0;
}

}  // namespace tandem
