// tandem bench
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <utility>

#include "api/calibrate.hpp"
#include "api/open_device.hpp"
#include "cli/bench/bench_machine.hpp"
#include "cli/bench/bench_modules.hpp"
#include "cli/bench/bench_report.hpp"
#include "cli/bench/bench_steps.hpp"
#include "cli/common/commands.hpp"
#include "cli/common/flags.hpp"
#include "cli/common/shipped_profiles.hpp"
#include "core/base/error.hpp"
#include "core/base/json_text.hpp"
#include "core/base/version.hpp"
#include "core/device/device_name.hpp"
#include "io/atomic_file.hpp"
#include "scheduler/tasks/traffic.hpp"
#include "train/config/units.hpp"
#include "train/hf/trained_layout.hpp"
#include "train/runtime/stop_signal.hpp"
#include "train/setup/performance.hpp"
#include "train/setup/profile_machine.hpp"
#include "train/setup/run_setup.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

// Change time and memory, never the state: so all rows of a sweep must agree in their digest.
constexpr std::array<std::string_view, 7> sweepable{"device-memory", "host-memory",     "link-bandwidth", "update-rate",
                                                    "subgroup-size", "resident-layers", "prefetch-layers"};
constexpr std::array<std::string_view, 29> fixed{"model",         "device",
                                                 "state",         "compute",
                                                 "recompute",     "offload-activations",
                                                 "freeze",        "micro-batch",
                                                 "grad-accum",    "accumulation-order",
                                                 "seq-len",       "seed",
                                                 "threads",       "update-threads",
                                                 "numa-node",     "state-dir",
                                                 "clip",          "on-nonfinite",
                                                 "lora-rank",     "lora-alpha",
                                                 "lora-targets",  "lora-dropout",
                                                 "lora-rslora",   "lora-modules-to-save",
                                                 "lora-experts",  "adapter",
                                                 "base",          "fp8-gradients",
                                                 "fp8-accumulation"};
constexpr std::string_view rows_name = "rows.jsonl";
constexpr std::string_view profile_name = "profile.toml";
constexpr std::string_view compute_key = "compute_measured";

const std::vector<std::string> all_policies{"host", "stream", "interleave:2", "static:0.5", "auto"}, one_policy{"auto"};

struct BenchFlags {
  ConfigFlags config;
  std::vector<std::string> policies;
  std::string profile;
  std::string out;
  std::string compute_factors;
  int steps = 5;
  bool modules = false;
  bool resume = false;
  bool json = false;

  /// The combinations of all flags that were given several values.
  std::vector<BenchSetting> settings() const {
    std::vector<std::pair<std::string, std::vector<std::string>>> swept;
    for (const std::string_view name : sweepable) {
      if (auto values = config.values(name); values.size() > 1) swept.emplace_back(name, std::move(values));
    }
    return combinations(swept);
  }
};

/// How much longer forward and backward take than a profile's rates say, and what they were measured of.
struct KeptCompute {
  Json of;
  LayerSeconds slower;
};

TrainConfig with(TrainConfig config, const BenchSetting& setting) {
  for (const auto& [flag, value] : setting) set_config_field(config, *find_config_field(flag), {value});
  return config;
}

class Bench {
 public:
  Bench(const BenchFlags& flags, TrainConfig config, ModelSource source, std::string command)
      : flags_(flags), config_(std::move(config)), source_(std::move(source)) {
    report_.command = std::move(command);
    report_.model = source_.config.name;
    report_.tokens = static_cast<double>(config_.micro_batch * config_.grad_accum * config_.seq_len);
    layout_ = trained_layout(config_, source_.config);
    report_.parameters = static_cast<double>(layout_.parameter_count());
    for (const BenchSetting& setting : flags.settings()) {
      for (const std::string& policy : flags.policies) {
        BenchRow& row = planned_.emplace_back();
        row.setting = setting;
        row.policy = policy;
      }
    }
  }

  /// Every row that is not there yet, until a signal comes. Throws UsageError where `--resume` meets another bench,
  /// BenchInterrupted where the signal comes before the first row: there is nothing to report then.
  BenchReport run() {
    find_machine();
    const double begin = trace_now();
    const std::size_t before = report_.rows.size();
    try {
      while (report_.rows.size() < planned_.size() && StopSignal::received() == 0) {
        progress(begin, before);
        BenchRow row = result_of(planned_[report_.rows.size()]);
        if (file_) file_->append(row);
        report_.rows.push_back(std::move(row));
      }
    } catch (const BenchInterrupted&) {
      say("interrupted");
    }
    report_.missing = planned_.size() - report_.rows.size();
    if (!flags_.out.empty() && report_.best() != nullptr) report_.timeline = trace_file(*report_.best());
    for (const BenchSetting& setting : flags_.settings()) draw_bound(setting);
    return std::move(report_);
  }

 private:
  bool executes() const { return flags_.profile.empty(); }
  fs::path out(std::string_view name) const { return fs::path(flags_.out) / name; }

  void progress(double begin, std::size_t before) const {
    const std::size_t done = report_.rows.size();
    std::string time;
    if (done > before) {
      const double each = (trace_now() - begin) / static_cast<double>(done - before);
      time = fmt::format(", about {} left", format_duration(each * static_cast<double>(planned_.size() - done)));
    }
    say(fmt::format("{} of {}: {}{}", done + 1, planned_.size(), planned_[done].name(), time));
  }

  // -- the machine -------------------------------------------------------------------------------------------

  void find_machine() {
    TrainConfig bare = config_;
    bare.device_memory = bare.host_memory = 0;
    bare.link_bandwidth = bare.update_rate = 0.0;
    bare.subgroup_size = 0;
    bare.resident_layers = -1;
    bare.prefetch_layers = 0;
    std::unique_ptr<Device> device;
    if (executes()) {
      device = open_device(bare.device, device_options(bare));
      profile_ = identify(*device);
      report_.machine = fmt::format("{}, {}", profile_.cpu.empty() ? "CPU unknown" : profile_.cpu, device->info().name);
    } else {
      profile_ = find_profile(flags_.profile);
      report_.machine = fmt::format("{}, simulated", profile_.name);
    }
    const Json head = identity();
    if (flags_.resume && fs::exists(out(rows_name))) return take_up(head);
    const std::optional<KeptCompute> kept = kept_compute();
    // Makes the folder before anything takes long, and removes it on a refusal, so that the next try does not meet it.
    Unfinished made(flags_.out.empty() || fs::exists(flags_.out) ? fs::path() : fs::path(flags_.out));
    if (!flags_.out.empty()) create_directories_or_throw(flags_.out);
    if (executes()) {
      profile_ = calibrated(*device, config_, layout_);
      take_compute(bare, kept);
    }
    if (!flags_.out.empty()) keep_machine(head);
    made.keep();
  }

  /// Settings that must be equal where a bench continues an earlier one.
  Json identity() const {
    Json head{{"version", version}, {"machine", report_.machine}, {"driver", profile_.driver}};
    head["profile"] = executes() ? "" : profile_toml(profile_);
    head["policies"] = flags_.policies;
    head["steps"] = flags_.steps;
    for (const std::string_view name : fixed) {
      if (name != "model") head[std::string(name)] = find_config_field(name)->get(config_);
    }
    head["model"] = report_.model;
    head["seq-len"] = config_.seq_len;
    for (const std::string_view name : sweepable) {
      const auto typed = flags_.config.values(name);
      head[std::string(name)] = typed.empty() ? find_config_field(name)->get(config_) : typed;
    }
    return head;
  }

  void keep_machine(Json head) {
    write_file_atomically(out(profile_name), profile_toml(profile_));
    head["slower"] = {slower_.forward, slower_.backward};
    head[std::string(compute_key)] = report_.compute_measured;
    file_.emplace(out(rows_name), head);
  }

  /// The rows that are there, and the figures that they were predicted by.
  void take_up(const Json& head) {
    file_ = RowFile::resume(out(rows_name), head);
    report_.rows = file_->rows();
    for (std::size_t i = 0; i < report_.rows.size(); ++i) {
      if (i >= planned_.size() || report_.rows[i].name() != planned_[i].name()) {
        throw InputError(out(rows_name).string(), fmt::format("row {} is of another bench", i + 1),
                         "name another --out");
      }
    }
    profile_ = read_profile(out(profile_name));
    const auto slower = file_->head().value("slower", std::vector<double>{1.0, 1.0});
    slower_ = {slower.at(0), slower.at(1)};
    report_.compute_measured = file_->head().value(std::string(compute_key), true);
    say(fmt::format("{} of {} rows are there", report_.rows.size(), planned_.size()));
  }

  /// Forward and backward as measured here or, with --compute-factors, by a bench before. Not measured where the whole
  /// model is to stay on the device: the rows are that measurement, and to load it twice takes longer than they do.
  void take_compute(const TrainConfig& bare, const std::optional<KeptCompute>& kept) {
    if (on_the_device_alone()) {
      say("policy device alone: compute is taken from the calibration");
      return;
    }
    const Json of = identity_of_compute();
    if (kept && kept->of == of) {
      slower_ = kept->slower;
      report_.compute_measured = true;
      return;
    }
    if (kept) say(fmt::format("{} is of another model, machine, calibration or flags", flags_.compute_factors));
    measure_compute(bare);
    if (flags_.compute_factors.empty() || !report_.compute_measured) return;
    write_file_atomically(flags_.compute_factors,
                          json_document(Json{{"of", of}, {"slower", {slower_.forward, slower_.backward}}}));
  }

  /// Settings that the factors depend on: all that is common to all rows and policies, and the rates that they
  /// multiply.
  Json identity_of_compute() const {
    Json of = identity();
    for (const std::string_view name : {"policies", "steps", "profile", "clip", "on-nonfinite"})
      of.erase(std::string(name));
    for (const std::string_view name : sweepable) of.erase(std::string(name));
    of["parameters"] = report_.parameters;
    of["calibration"] = profile_toml(profile_);
    return of;
  }

  /// Factors kept in the file of --compute-factors, where that is there and asked for: a damaged one is reported before
  /// anything is measured.
  std::optional<KeptCompute> kept_compute() const {
    const fs::path file = flags_.compute_factors;
    if (!executes() || on_the_device_alone() || file.empty() || !fs::exists(file)) return std::nullopt;
    try {
      std::ifstream in(file, std::ios::binary);
      const Json kept = parse_json<Json>(std::string(std::istreambuf_iterator<char>(in), {}));
      if (kept.is_discarded()) throw std::runtime_error("it is no JSON");
      const auto slower = kept.at("slower").get<std::vector<double>>();
      return KeptCompute{kept.at("of"), {slower.at(0), slower.at(1)}};
    } catch (const std::exception& error) {
      throw InputError(file.string(), error.what(), "name a file that bench wrote, or one that is not there");
    }
  }

  bool on_the_device_alone() const {
    return std::ranges::all_of(flags_.policies, [](const auto& p) { return p == "device"; });
  }

  /// How much longer forward and backward take than the profile's rates say, with nothing else running. Left at
  /// 1 where the model does not fit without a ceiling. On the host's memory, which is the largest.
  void measure_compute(TrainConfig bare) {
    say("measuring forward and backward");
    bare.policy = Policy::host();
    bare.clip = 1.0;  // no update in backward
    try {
      RunSetup run = set_up_run(bare, source_.config, {.training = true, .saves = false, .predicts = false});
      BenchSteps steps(run, bare, source_);
      match_compute(run, steps.measure(5, true, profile_.dram.value));
      report_.compute_measured = true;
    } catch (const PlanError&) {
      say("it does not fit without a ceiling: compute is taken from the calibration");
    }
  }

  /// The factors with which the simulated phases are those measured. The simulator adds what is not the model's own
  /// work (zeroed buffers, rounded gradients), which has been measured with it: it must not count twice.
  void match_compute(const RunSetup& run, const StepFigures& measured) {
    constexpr int rounds = 6;  // each leaves a small part of the difference
    const auto seconds = compute_seconds(profile_, work_of(source_.config, run.model->shape(), {}, &run.layout));
    for (int round = 0; round < rounds; ++round) {
      auto slower = seconds;
      for (LayerSeconds& s : slower) s = {s.forward * slower_.forward, s.backward * slower_.backward};
      const Simulation s = simulate(run.layout, run.plan, profile_, slower,
                                    {.micro_batches = static_cast<int>(config_.grad_accum), .overlap_updates = false});
      slower_.forward *= measured.forward_seconds / (s.forward_seconds - s.update_seconds);
      slower_.backward *= measured.backward_seconds / s.backward_seconds;
    }
  }

  // -- rows --------------------------------------------------------------------------------------------------

  BenchRow result_of(BenchRow row) {
    try {
      TrainConfig config = with(config_, row.setting);
      config.policy = parse_policy(row.policy);
      const MachineProfile profile = as_emulated(profile_, config);
      executes() ? execute(config, profile, row) : predict(config, profile, row);
    } catch (const PlanError& error) {
      row.refusal = error.what();
    } catch (const UsageError& error) {
      if (row.setting.empty()) throw;
      row.refusal = error.what();  // a policy that contradicts some of the swept values
    }
    return row;
  }

  static void describe(const RunPlan& run, BenchRow& row) {
    row.activations = activations_of(run.model_config, run.shape);
    row.planned_device_bytes = run.planned_device_bytes();
    row.planned_host_bytes = run.planned_host_bytes();
  }

  void predict(const TrainConfig& config, const MachineProfile& profile, BenchRow& row) {
    const ProfileMachine elsewhere = machine_of(profile_, config);
    const RunPlan run = plan_run(config, source_.config, {.training = true}, elsewhere.machine);
    describe(run, row);
    note(run.layout, run.prediction->choice, profile, run.prediction->compute, row);
  }

  void execute(const TrainConfig& config, const MachineProfile& profile, BenchRow& row) {
    RunSetup run = set_up_run(config, source_.config, {.training = true}, {.profile = &profile, .slower = slower_});
    describe(run, row);
    note(run.layout, run.prediction->choice, profile, run.prediction->compute, row);
    BenchSteps steps(run, config, source_);
    row.measured = steps.measure(flags_.steps, false, profile_.dram.value);
    row.state_digest = steps.engine().state_digest();
    row.peak_device_bytes = run.peak_device_bytes();
  }

  /// The plan and its simulation, and the simulated step as a trace file.
  void note(const ParameterLayout& layout, const Choice& choice, const MachineProfile& profile,
            const std::vector<LayerSeconds>& seconds, BenchRow& row) const {
    const Plan::Shares shares = choice.plan.shares();
    const auto all = std::max(1.0, static_cast<double>(shares.cpu + shares.streamed + shares.resident));
    row.resolved = choice.plan.policy.text();
    row.cpu_share = static_cast<double>(shares.cpu) / all;
    row.streamed_share = static_cast<double>(shares.streamed) / all;
    row.resident_share = static_cast<double>(shares.resident) / all;
    const Traffic traffic = traffic_of_step(layout, choice.plan, static_cast<int>(config_.grad_accum));
    row.h2d_bytes = traffic.host_to_device;
    row.d2h_bytes = traffic.device_to_host;
    const Simulation& s = choice.simulation;
    row.predicted = {.step_seconds = s.step_seconds,
                     .forward_seconds = s.forward_seconds,
                     .backward_seconds = s.backward_seconds,
                     .update_seconds = s.update_seconds,
                     .exposed_update_seconds = s.exposed_update_seconds,
                     .tokens_per_second = report_.tokens / s.step_seconds,
                     .bound_by = std::string(name_of(s.bound_by()))};
    SimulationOptions options{.micro_batches = static_cast<int>(config_.grad_accum)};
    // Without overhead tasks may start in another order, and that may happen to be a little longer: not by what
    // overhead costs, so that the ideal is never more than the prediction.
    const Simulation ideal = simulate(layout, choice.plan, without_overhead(profile), seconds, options);
    row.ideal_step_seconds = std::min(ideal.step_seconds, s.step_seconds);
    if (flags_.out.empty()) return;
    Trace spans;
    options.trace = &spans;
    simulate(layout, choice.plan, profile, seconds, options);
    spans.write(trace_file(row));
  }

  fs::path trace_file(const BenchRow& row) const {
    std::string name = row.name();
    for (char& c : name) {
      if (std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '.') c = '-';
    }
    return out(fmt::format("simulated-{}.trace.json", name));
  }

  /// The closed form of the machine as a setting emulates it, where that differs from the settings before.
  void draw_bound(const BenchSetting& setting) {
    std::string machine;
    for (const auto& [flag, value] : setting) {
      if (flag != "link-bandwidth" && flag != "update-rate") continue;
      machine += fmt::format("{}{} {}", machine.empty() ? "" : ", ", flag, value);
    }
    for (const BoundPoint& point : report_.bound) {
      if (point.machine == machine) return;
    }
    const MachineProfile profile = in_format(as_emulated(profile_, with(config_, setting)), config_.state);
    const PathSetting path{.weights_resident = true,
                           .gradient_on_device = true,
                           .cpu_kernel_bytes = profile.cpu_update_bytes.value,
                           .state = config_.state};
    for (int percent = 0; percent <= 100; percent += 2) {
      const double share = percent / 100.0;
      report_.bound.push_back({machine, share, 1.0 / update_seconds(profile, path, 1.0, share)});
    }
  }

  const BenchFlags& flags_;
  TrainConfig config_;
  ModelSource source_;
  ParameterLayout layout_;
  MachineProfile profile_;  ///< nothing of it emulated
  LayerSeconds slower_{1.0, 1.0};
  std::vector<BenchRow> planned_;
  std::optional<RowFile> file_;  ///< rows in --out
  BenchReport report_;
};

/// Checks that neither policy nor setting has changed the state.
void compare_digests(const BenchReport& report) {
  const BenchRow* first = nullptr;
  for (const BenchRow& row : report.rows) {
    if (row.state_digest.empty()) continue;
    if (first == nullptr) first = &row;
    if (row.state_digest != first->state_digest) {
      throw MisuseError(
          "policies led to different states",
          fmt::format("{} to {}, {} to {}", first->name(), first->state_digest, row.name(), row.state_digest));
    }
  }
}

/// Rows of one name would write one trace.
void refuse_twice(std::string_view flag, std::vector<std::string> values) {
  std::ranges::sort(values);
  const auto twice = std::ranges::adjacent_find(values);
  if (twice != values.end())
    throw UsageError(fmt::format("--{} {}", flag, *twice), "given twice", "give each value once");
}

/// Modules are those of one step.
void check_modules(const BenchFlags& flags) {
  const std::string what = "--modules";
  if (flags.policies.size() > 1) throw UsageError(what, "it is of one policy", "give --policy once");
  if (flags.settings().size() > 1) throw UsageError(what, "it is of one setting", "give each flag one value");
  if (flags.resume) throw UsageError(what, "it has no rows to go on with", "leave --resume out");
  if (!flags.compute_factors.empty()) {
    throw UsageError(what, "it predicts by the calibration alone", "leave --compute-factors out");
  }
}

void check(const BenchFlags& flags, const TrainConfig& config) {
  if (flags.modules) check_modules(flags);
  require_one_device(config.device, "bench");
  for (const BenchSetting& setting : flags.settings()) check_config(with(config, setting));
  for (const std::string& policy : flags.policies) parse_policy(policy);
  refuse_twice("policies", flags.policies);
  for (const std::string_view name : sweepable) refuse_twice(name, flags.config.values(name));
  if (flags.steps < 1) throw UsageError("--steps", "it must be at least 1");
  if (flags.resume && flags.out.empty()) throw UsageError("--resume", "there is nothing to go on with", "name --out");
  if (flags.out.empty() || !fs::exists(flags.out)) return;
  const std::string what = fmt::format("--out {}", flags.out);
  if (!flags.resume) throw UsageError(what, "it exists", "name another folder, or go on with --resume");
  // An interruption may come before the first row.
  if (!fs::exists(fs::path(flags.out) / rows_name) && !(fs::is_directory(flags.out) && fs::is_empty(flags.out))) {
    throw UsageError(what, fmt::format("it exists and holds no {}", rows_name), "name another folder");
  }
}

int bench(BenchFlags flags, const ProgramContext& context) {
  if (flags.policies.empty()) flags.policies = flags.modules ? one_policy : all_policies;
  TrainConfig config = flags.config.config();
  if (config.model.empty()) config.model = "tiny-gpt2";
  check(flags, config);
  ModelSource source = find_model(config.model, {.from_scratch = config.from_scratch, .out = flags.out});
  take_adapters(config, source);
  config.seq_len = sequence_length(config, source.config);
  recompute_of(config, source.config);  // a contradiction is told before anything is measured
  const StopSignal signals;
  if (flags.modules) {
    config.policy = parse_policy(flags.policies.front());
    return bench_modules(
        {config, std::move(source), flags.profile, flags.out, context.command_line, flags.steps, flags.json});
  }
  BenchReport report;
  try {
    report = Bench(flags, config, std::move(source), context.command_line).run();
  } catch (const BenchInterrupted&) {
    say(fmt::format("interrupted before the first row{}", flags.out.empty() ? "" : ": --resume begins anew"));
    return exit_code_of(StopSignal::received());
  }
  if (!flags.out.empty()) {
    write_file_atomically(fs::path(flags.out) / "report.json", report.json());
    write_file_atomically(fs::path(flags.out) / "report.html", report.html());
  }
  print_output(flags.json ? report.json() : report.table());
  compare_digests(report);
  if (StopSignal::received() != 0 && report.missing > 0) {
    if (!flags.out.empty()) say(fmt::format("{} rows are missing: --resume goes on", report.missing));
    return exit_code_of(StopSignal::received());
  }
  if (report.best() == nullptr) throw PlanError("bench", "no policy fits", "each row says what it lacks");
  return 0;
}

}  // namespace

CommandFunction add_bench_command(CLI::App& program) {
  auto* command = program.add_subcommand("bench", "compares policies on the same work, executed or simulated");
  auto flags = std::make_shared<BenchFlags>();
  std::vector<std::string_view> names(fixed.begin(), fixed.end());
  names.insert(names.end(), sweepable.begin(), sweepable.end());
  flags->config.add_to(*command, names, {sweepable.begin(), sweepable.end()});
  command
      ->add_option(
          "--policies,--policy", flags->policies,
          "which, one after another. Default: host stream interleave:2 static:0.5 auto; with --modules auto. Example: "
          "--policies host auto")
      ->type_name("POLICY ...");
  add_profile_option(*command, flags->profile,
                     "simulates over this machine instead of executing here, a file or the name of a shipped profile. "
                     "Default: executes. Example: --profile 24gb-pcie4");
  command
      ->add_option("--steps", flags->steps,
                   "steps that are measured, after one that is not. Default: 5. Example: --steps 10")
      ->type_name("STEPS");
  command
      ->add_option("--out", flags->out,
                   "new folder for report.html, report.json and traces, or modules.json. Default: none. Example: --out "
                   "bench-1")
      ->type_name("DIR");
  command
      ->add_option("--compute-factors", flags->compute_factors,
                   "file that keeps forward and backward as measured, for later benches of the same model, machine and "
                   "flags; written anew where they are others. Default: measured each time. Example: --compute-factors "
                   "gpt2.json")
      ->type_name("FILE");
  command->add_flag(
      "--modules", flags->modules,
      "one step by kinds of modules: time, FLOPs, bytes and what bounds each, and the engine's work beside "
      "them, measured beside predicted. Default: off");
  command->add_flag("--resume", flags->resume,
                    "goes on with the rows that are missing in --out; the flags must be the same. Default: off");
  command->add_flag("--json", flags->json, "one JSON object on standard output. Default: off");
  command->footer(
      "Flags that take several values are swept: each policy under every combination.\n"
      "Example: tandem bench --model tiny-gpt2 --link-bandwidth 1GB/s 4GB/s --device-memory 16MiB 24MiB --out bench-1");
  return [flags](const ProgramContext& context) { return bench(*flags, context); };
}

}  // namespace tandem
