// tandem bench
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <utility>

#include "api/calibrate.hpp"
#include "api/open_device.hpp"
#include "cli/bench_report.hpp"
#include "cli/commands.hpp"
#include "cli/flags.hpp"
#include "cli/what_if.hpp"
#include "core/error.hpp"
#include "train/loaded_model.hpp"
#include "train/model_source.hpp"
#include "train/performance.hpp"
#include "train/phase_clock.hpp"
#include "train/run_setup.hpp"
#include "train/units.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;

struct BenchFlags {
  ConfigFlags config;
  std::vector<std::string> policies{"host", "stream", "interleave:2", "static:0.5", "auto"};
  std::string profile;
  std::string out;
  int steps = 5;
  bool json = false;
};

void say(const std::string& line) { std::fputs((line + "\n").c_str(), stderr); }

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// Drives one loaded model over tokens that are a function of seed, step and position alone.
class Steps {
 public:
  Steps(RunSetup& run, const TrainConfig& config, const ModelSource& source)
      : config_(config), loaded_(run, nullptr), clock_(*run.device), vocabulary_(source.config.vocabulary) {
    loaded_.engine().initialize(initial_values(source, run.layout, config.seed));
  }

  /// `apart`: updates end before the next forward begins, so that phases are those of compute alone.
  MeasuredStep measure(int steps, bool apart) {
    std::vector<double> step, forward, backward, exposed;
    one(apart);  // fills buffers and touches memory
    const double updates_before = loaded_.engine().counters().update_seconds;
    for (int i = 0; i < steps; ++i) {
      const double begin = trace_now();
      exposed.push_back(one(apart));
      step.push_back(trace_now() - begin);
      clock_.finish_forward_and_backward(forward.emplace_back(), backward.emplace_back());
    }
    loaded_.engine().wait();
    MeasuredStep result;
    result.step_seconds = median(step);
    result.forward_seconds = median(forward);
    result.backward_seconds = median(backward);
    result.exposed_update_seconds = median(exposed);
    result.update_seconds = (loaded_.engine().counters().update_seconds - updates_before) / steps;
    result.tokens_per_second = targets() / result.step_seconds;
    return result;
  }

  double targets() const { return static_cast<double>(config_.micro_batch * config_.grad_accum * config_.seq_len); }
  OffloadEngine& engine() { return loaded_.engine(); }

 private:
  /// Returns the seconds that the step waited for updates.
  double one(bool apart) {
    if (apart) loaded_.engine().wait();
    PhaseProbe probe(loaded_.engine(), clock_);
    loaded_.engine().begin_step({.lr = 1e-4,
                                 .max_grad_norm = 1.0,
                                 .micro_batches = static_cast<int>(config_.grad_accum),
                                 .gradient_scale = 1.0});
    for (std::int64_t micro = 0; micro < config_.grad_accum; ++micro) {
      const HostBatch batch = loaded_.batch(static_cast<std::size_t>(micro));
      fill(batch.tokens);
      fill(batch.targets);
      probe.begin_micro_batch(loaded_.stream());
      loaded_.train(static_cast<std::size_t>(micro), probe, static_cast<float>(1.0 / targets()));
    }
    clock_.mark(Phase::idle, loaded_.stream());
    const StepReport report = loaded_.engine().end_step();
    loaded_.wait_for_losses();
    return report.exposed_update_seconds;
  }

  void fill(std::span<std::int32_t> tokens) {
    constexpr std::uint64_t multiplier = 6364136223846793005U;
    constexpr std::uint64_t increment = 1442695040888963407U;
    for (std::int32_t& token : tokens) {
      state_ = state_ * multiplier + increment;
      token = static_cast<std::int32_t>((state_ >> 33) % static_cast<std::uint64_t>(vocabulary_));
    }
  }

  const TrainConfig& config_;
  LoadedModel loaded_;
  PhaseClock clock_;
  std::int64_t vocabulary_;
  std::uint64_t state_ = 1;
};

class Bench {
 public:
  Bench(const BenchFlags& flags, TrainConfig config, ModelSource source, std::string command)
      : flags_(flags), config_(std::move(config)), source_(std::move(source)) {
    report_.command = std::move(command);
    report_.model = source_.config.name;
    report_.tokens = static_cast<double>(config_.micro_batch * config_.grad_accum * config_.seq_len);
    layout_ = frozen_layout(source_.config, config_.freeze);
    report_.parameters = static_cast<double>(layout_.parameter_count());
  }

  BenchReport run() {
    find_machine();
    int done = 0;
    const double begin = trace_now();
    for (const std::string& policy : flags_.policies) {
      const auto left = static_cast<double>(flags_.policies.size()) - done;
      const std::string time =
          done == 0 ? "" : fmt::format(", about {} left", format_duration((trace_now() - begin) / done * left));
      say(fmt::format("{} of {}: {}{}", ++done, flags_.policies.size(), policy, time));
      report_.policies.push_back(result_of(policy));
    }
    const PathSetting setting{
        .weights_resident = true, .gradient_on_device = true, .cpu_kernel_bytes = profile_.cpu_update_bytes.value};
    for (int percent = 0; percent <= 100; percent += 2) {
      const double share = percent / 100.0;
      report_.bound.push_back({share, 1.0 / update_seconds(profile_, setting, 1.0, share)});
    }
    return std::move(report_);
  }

 private:
  bool executes() const { return flags_.profile.empty(); }

  void find_machine() {
    if (!executes()) {
      profile_ = read_profile(flags_.profile);
      if (config_.link_bandwidth > 0.0) profile_ = with_link(std::move(profile_), config_.link_bandwidth);
      report_.machine = fmt::format("{}, simulated", profile_.name);
      return;
    }
    TrainConfig bare = config_;
    bare.device_memory = 0;
    bare.link_bandwidth = 0.0;
    const std::unique_ptr<Device> device = open_device(bare.device, device_options(bare));
    auto profile = find_calibration(*device, config_);
    if (!profile) {
      say("calibrating");
      CalibrationOptions quick;
      quick.seconds_per_figure = 0.15;
      profile = calibrate(*device, quick);
      if (config_.link_bandwidth > 0.0) profile = with_link(*std::move(profile), config_.link_bandwidth);
    }
    profile_ = *std::move(profile);
    report_.machine = fmt::format("{}, {}", profile_.cpu.empty() ? "CPU unknown" : profile_.cpu, device->info().name);
    measure_compute(bare);
  }

  /// How much longer forward and backward take than the profile's rates say, with nothing else running. Left at
  /// 1 where the model does not fit without a ceiling.
  void measure_compute(TrainConfig bare) {
    say("measuring forward and backward");
    bare.policy = parse_policy("host");
    try {
      RunSetup run = set_up_run(bare, source_.config, layout_, {.training = true, .saves = false, .predicts = false});
      Steps steps(run, bare, source_);
      const MeasuredStep measured = steps.measure(3, true);
      LayerSeconds all;
      for (const LayerSeconds& s : compute_seconds(profile_, work_of(source_.config, run.model->shape()))) {
        all.forward += s.forward;
        all.backward += s.backward;
      }
      const auto micro_batches = static_cast<double>(config_.grad_accum);
      slower_ = {measured.forward_seconds / (micro_batches * all.forward),
                 measured.backward_seconds / (micro_batches * all.backward)};
    } catch (const PlanError&) {
      say("it does not fit without a ceiling: compute is taken from the calibration");
    }
  }

  PolicyResult result_of(const std::string& policy) {
    PolicyResult result;
    result.policy = policy;
    try {
      TrainConfig config = config_;
      config.policy = parse_policy(policy);
      executes() ? execute(config, result) : predict(config, result);
    } catch (const PlanError& error) {
      result.refusal = error.what();
    }
    return result;
  }

  void note(const Plan& plan, PolicyResult& result) const {
    result.resolved = plan.policy.text();
    result.shares = plan.shares();
  }

  void predict(const TrainConfig& config, PolicyResult& result) {
    const WhatIf what = plan_for_machine(config, source_.config, profile_);
    note(what.choice.plan, result);
    result.planned_device_bytes = what.choice.plan.memory.device_bytes() + what.options.reserved_device_memory;
    result.planned_host_bytes = what.choice.plan.memory.host_bytes();
    result.predicted = what.choice.simulation;
    trace(what.layout, what.choice.plan, what.compute, result.policy);
  }

  void execute(const TrainConfig& config, PolicyResult& result) {
    RunSetup run = set_up_run(config, source_.config, layout_,
                              {.training = true, .saves = false, .profile = &profile_, .slower = slower_});
    note(run.plan, result);
    result.planned_device_bytes = run.plan.memory.device_bytes() + run.activation_bytes;
    result.planned_host_bytes = run.plan.memory.host_bytes();
    result.predicted = run.prediction->choice.simulation;
    trace(run.layout, run.plan, run.prediction->compute, result.policy);
    Steps steps(run, config, source_);
    result.measured = steps.measure(flags_.steps, false);
    result.state_digest = steps.engine().state_digest();
    result.peak_device_bytes = run.device->peak_bytes();
  }

  /// The simulated step as a trace file; the report shows the last policy's, which is auto by default.
  void trace(const ParameterLayout& layout, const Plan& plan, const std::vector<LayerSeconds>& seconds,
             const std::string& policy) {
    if (flags_.out.empty()) return;
    std::string name = policy;
    for (char& c : name) {
      if (std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '.') c = '-';
    }
    const fs::path file = fs::path(flags_.out) / fmt::format("simulated-{}.trace.json", name);
    Trace spans;
    simulate(layout, plan, profile_, seconds, {.micro_batches = static_cast<int>(config_.grad_accum), .trace = &spans});
    spans.write(file);
    report_.timeline = file;
  }

  const BenchFlags& flags_;
  TrainConfig config_;
  ModelSource source_;
  ParameterLayout layout_;
  MachineProfile profile_;
  LayerSeconds slower_{1.0, 1.0};
  BenchReport report_;
};

void write(const fs::path& file, const std::string& text) {
  std::ofstream out(file, std::ios::binary | std::ios::trunc);
  out << text;
  if (!out.flush()) throw WriteError(file.string(), "it cannot be written");
}

/// The policy changes time and memory, never the state.
void compare_digests(const BenchReport& report) {
  const PolicyResult* first = nullptr;
  for (const PolicyResult& p : report.policies) {
    if (p.state_digest.empty()) continue;
    if (first == nullptr) first = &p;
    if (p.state_digest != first->state_digest) {
      throw MisuseError("policies led to different states", fmt::format("{} to {}, {} to {}", first->policy,
                                                                        first->state_digest, p.policy, p.state_digest));
    }
  }
}

int bench(const BenchFlags& flags, const ProgramContext& context) {
  TrainConfig config = flags.config.config();
  if (config.model.empty()) config.model = "tiny-gpt2";
  check_config(config);
  for (const std::string& policy : flags.policies) parse_policy(policy);
  if (flags.steps < 1) throw UsageError("--steps", "it must be at least 1");
  ModelSource source = find_model(config.model);
  config.seq_len = sequence_length(config, source.config);
  if (!flags.out.empty()) {
    if (fs::exists(flags.out)) throw UsageError(fmt::format("--out {}", flags.out), "it exists", "name another folder");
    std::error_code error;
    if (!fs::create_directories(flags.out, error))
      throw WriteError(fmt::format("--out {}", flags.out), error.message());
  }
  const BenchReport report = Bench(flags, config, std::move(source), context.command_line).run();
  if (!flags.out.empty()) {
    write(fs::path(flags.out) / "report.json", report.json());
    write(fs::path(flags.out) / "report.html", report.html());
  }
  print_output(flags.json ? report.json() : report.table());
  compare_digests(report);
  if (report.best() == nullptr) throw PlanError("bench", "no policy fits", "raise --device-memory");
  return 0;
}

}  // namespace

CommandFunction add_bench_command(CLI::App& program) {
  auto* command = program.add_subcommand("bench", "compares policies on the same work, executed or simulated");
  auto flags = std::make_shared<BenchFlags>();
  flags->config.add_to(*command, {"model", "device", "device-memory", "host-memory", "link-bandwidth", "subgroup-size",
                                  "resident-layers", "prefetch-layers", "compute", "recompute", "micro-batch",
                                  "grad-accum", "seq-len", "seed", "threads", "update-threads"});
  command
      ->add_option(
          "--policies", flags->policies,
          "which, one after another. Default: host stream interleave:2 static:0.5 auto. Example: --policies host "
          "auto")
      ->type_name("POLICY ...");
  command
      ->add_option("--profile", flags->profile,
                   "simulates over this machine instead of executing here. Default: executes. Example: --profile "
                   "profiles/24gb-pcie4.toml")
      ->type_name("FILE");
  command
      ->add_option("--steps", flags->steps,
                   "steps that are measured, after one that is not. Default: 5. Example: --steps 10")
      ->type_name("STEPS");
  command
      ->add_option("--out", flags->out,
                   "new folder for report.html, report.json and traces. Default: none. Example: --out bench-1")
      ->type_name("DIR");
  command->add_flag("--json", flags->json, "one JSON object on standard output. Default: off");
  command->footer("Example: tandem bench --model tiny-gpt2 --link-bandwidth 1GB/s --out bench-1");
  return [flags](const ProgramContext& context) { return bench(*flags, context); };
}

}  // namespace tandem
