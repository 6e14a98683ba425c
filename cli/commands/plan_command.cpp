// tandem plan
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/common/commands.hpp"
#include "cli/common/flags.hpp"
#include "cli/common/shipped_profiles.hpp"
#include "cli/common/step_modules.hpp"
#include "core/base/error.hpp"
#include "core/base/json_text.hpp"
#include "scheduler/machine/cost_model.hpp"
#include "scheduler/search/upgrades.hpp"
#include "train/config/units.hpp"
#include "train/hf/adapter_source.hpp"
#include "train/hf/model_source.hpp"
#include "train/hf/trained_layout.hpp"
#include "train/report/record_scores.hpp"
#include "train/setup/profile_machine.hpp"
#include "train/setup/reference_choice.hpp"
#include "train/setup/run_setup.hpp"
#include "train/setup/training_data.hpp"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

struct PlanFlags {
  ConfigFlags config;
  std::string profile;
  std::string fit;
  std::string tokens;
  bool explain = false;
  bool json = false;
};

/// How what is not resident divides, without a simulation.
struct ClosedForms {
  double cpu_share = 0.0;
  /// The published stride, for fp32 state and without DRAM; infinite: nothing is streamed.
  double published_stride = 0.0;
};

/// Contents of the command's report, wherever the plan was made.
struct Planned {
  std::string model;
  std::int64_t parameters = 0;
  double targets = 0.0;     ///< targets of a step, as a sample of the data has them
  double all_tokens = 0.0;  ///< all tokens of a step
  std::int64_t tokens = 0;  ///< tokens whose time is asked for; 0: none
  Plan plan;
  MemoryPlan memory;
  std::string table;
  Saving saving;
  std::optional<CheckpointSpace> checkpoints;
  std::string order;  ///< order of the micro-batches; empty for a single one
  std::optional<ReferencePlan> reference;
  std::string activations;
  std::optional<Simulation> predicted;
  std::optional<double>
      confirmed_seconds;  ///< seconds of a step that is not clipped, where some updates may run ahead of the norm
  std::vector<Candidate> candidates;
  std::vector<Upgrade> upgrades;
  std::optional<StepModules> modules;       ///< set where it is explained
  std::optional<ClosedForms> closed_forms;  ///< set where the search asked them
  std::vector<std::string> doubts;          ///< about this machine's calibration
};

Json entries_of(const MemoryPlan& memory) {
  Json entries = Json::array();
  for (const MemoryEntry& e : memory.entries) {
    entries.push_back(
        {{"name", e.name}, {"phase", e.phase}, {"where", std::string(name_of(e.place))}, {"bytes", e.bytes}});
  }
  return entries;
}

Json shares_of(const Plan::Shares& shares) {
  const double all = std::max(1.0, static_cast<double>(shares.cpu + shares.streamed + shares.resident));
  const auto share = [&](std::int64_t part) { return static_cast<double>(part) / all; };
  return {
      {"cpu", share(shares.cpu)}, {"gpu_streamed", share(shares.streamed)}, {"gpu_resident", share(shares.resident)}};
}

Json json_of(const Simulation& s, double targets, double tokens) {
  return {{"step_seconds", s.step_seconds},
          {"forward_seconds", s.forward_seconds},
          {"backward_seconds", s.backward_seconds},
          {"update_seconds", s.update_seconds},
          {"exposed_update_seconds", s.exposed_update_seconds},
          {"tokens_per_second", targets / s.step_seconds},
          {"all_tokens_per_second", tokens / s.step_seconds},
          {"bound_by", name_of(s.bound_by())}};
}

Json json_of(const Saving& saving) {
  if (saving.every == 0) return nullptr;
  Json json{{"every", saving.every}, {"copies_state", saving.copies}, {"step_factor", nullptr}, {"steps", nullptr}};
  if (saving.slowdown) {
    json["step_factor"] = saving.slowdown->factor;
    json["steps"] = saving.slowdown->steps;
  }
  return json;
}

Json json_of(const std::optional<CheckpointSpace>& checkpoints) {
  if (!checkpoints) return nullptr;
  const auto& [bytes, at_once, there, available, folder] = *checkpoints;
  return {{"bytes", bytes},
          {"at_once", at_once > 0 ? Json(at_once) : Json(nullptr)},
          {"free_bytes", available ? Json(*available) : Json(nullptr)}};
}

Json json_of(const ReferencePlan& reference) {
  const auto seconds = [](const std::optional<double>& of) { return of ? Json(*of) : Json(nullptr); };
  return {{"when", reference.in_step ? "step" : "before"},
          {"why", reference.text},
          {"before_seconds", seconds(reference.before_seconds)},
          {"added_seconds", seconds(reference.added_seconds)}};
}

double seconds_of_tokens(const Planned& planned) {
  return static_cast<double>(planned.tokens) / planned.targets * planned.predicted->step_seconds;
}

std::string advice_of(const Planned& planned) {
  if (planned.upgrades.empty() || !planned.predicted) return {};
  const Upgrade& best = planned.upgrades.front();
  return fmt::format("{} would help most: {:.4g} s a step instead of {:.4g} s", best.what, best.step_seconds,
                     planned.predicted->step_seconds);
}

Json json_of(const Planned& planned, const std::string& fitted) {
  Json json{{"fits", true},
            {"model", planned.model},
            {"device_bytes", planned.memory.device_bytes()},
            {"host_bytes", planned.memory.host_bytes()},
            {"file_bytes", planned.memory.bytes_in(Place::file)},
            {"entries", entries_of(planned.memory)},
            {"policy", planned.plan.policy.text()},
            {"shares", shares_of(planned.plan.shares())},
            {"activations", planned.activations},
            {"micro_batches",
             {{"count", planned.plan.max_micro_batches * planned.plan.rank.count},
              {"at_once", planned.plan.micro_batches_at_once},
              {"order", planned.order.empty() ? Json(nullptr) : Json(planned.order)}}},
            {"predicted", nullptr},
            {"bound_by", nullptr},
            {"saving", json_of(planned.saving)},
            {"checkpoints", json_of(planned.checkpoints)},
            {"looks_wrong", planned.doubts},
            {"advice", advice_of(planned)}};
  if (planned.predicted) {
    json["predicted"] = json_of(*planned.predicted, planned.targets, planned.all_tokens);
    json["predicted"]["confirmed_step_seconds"] =
        planned.confirmed_seconds ? Json(*planned.confirmed_seconds) : Json(nullptr);
    json["bound_by"] = name_of(planned.predicted->bound_by());
  }
  if (planned.reference) json["reference"] = json_of(*planned.reference);
  if (planned.tokens > 0) json["tokens"] = {{"count", planned.tokens}, {"seconds", seconds_of_tokens(planned)}};
  if (!fitted.empty()) json["fit"] = fitted;
  for (const Candidate& c : planned.candidates) {
    Json row{{"policy", c.policy.text()}, {"improved", c.improved}, {"fits", c.fits}};
    if (c.fits) row[c.simulation.given_up ? "at_least_seconds" : "step_seconds"] = c.simulation.step_seconds;
    json["candidates"].push_back(std::move(row));
  }
  if (planned.closed_forms) {
    const double stride = planned.closed_forms->published_stride;
    json["closed_form_cpu_share"] = planned.closed_forms->cpu_share;
    json["published_stride"] = std::isinf(stride) ? Json(nullptr) : Json(stride);
  }
  for (const Upgrade& u : planned.upgrades) {
    json["upgrades"].push_back({{"what", u.what}, {"step_seconds", u.step_seconds}});
  }
  if (planned.modules) {
    const Json step = json_of(*planned.modules);
    for (const char* part : {"modules", "engine"}) json[part] = step[part];
  }
  return json;
}

Json json_of(const PlanError& error, const std::string& model) {
  const MemoryPlan* needs = error.needs();
  return {{"fits", false},
          {"model", model},
          {"device_bytes", needs ? Json(needs->device_bytes()) : Json(nullptr)},
          {"host_bytes", needs ? Json(needs->host_bytes()) : Json(nullptr)},
          {"file_bytes", needs ? Json(needs->bytes_in(Place::file)) : Json(nullptr)},
          {"entries", needs ? entries_of(*needs) : Json::array()},
          {"policy", nullptr},
          {"shares", nullptr},
          {"activations", nullptr},
          {"micro_batches", nullptr},
          {"predicted", nullptr},
          {"bound_by", nullptr},
          {"saving", nullptr},
          {"checkpoints", nullptr},
          {"looks_wrong", Json::array()},
          {"advice", error.what()}};
}

/// Target tokens a second; where the data has others too, also of all.
std::string rates(const Planned& planned) {
  const double seconds = planned.predicted->step_seconds;
  if (planned.targets == planned.all_tokens) return fmt::format("{:.0f} tokens/s", planned.targets / seconds);
  return fmt::format("{:.0f} target tokens/s, {:.0f} of all tokens", planned.targets / seconds,
                     planned.all_tokens / seconds);
}

std::string time_table(const Planned& planned) {
  const Simulation& s = *planned.predicted;
  std::string text = fmt::format(
      "{:<28}{:>12}\n{:<28}{:>12.4f}\n{:<28}{:>12.4f}\n{:<28}{:>12.4f}\n{:<28}{:>12.4f}\n{:<28}{:>12.4f}   {}, "
      "bound by {}\n",
      "time", "seconds", "forward", s.forward_seconds, "backward", s.backward_seconds, "update", s.update_seconds,
      "waiting for weights", s.exposed_update_seconds, "step", s.step_seconds, rates(planned), name_of(s.bound_by()));
  if (planned.confirmed_seconds) {
    text += fmt::format("{:<28}{:>12.4f}   updates run ahead of the gradient norm\n", "step, not clipped",
                        *planned.confirmed_seconds);
  }
  return text;
}

std::string text_of(const ClosedForms& forms) {
  std::string text = fmt::format("rules of thumb: of the state that is not resident, {:.0f}% updated on the CPU (here)",
                                 100.0 * forms.cpu_share);
  if (std::isinf(forms.published_stride)) return text + "; no subgroup streamed (as published)\n";
  return text + fmt::format("; one subgroup in {:.1f} streamed (as published)\n", forms.published_stride);
}

/// "compute 34%, host to device 56%", those that are used at all.
std::string text_of_use(const ResourceShares& use) {
  std::string text;
  for (int r = 0; r < resource_count; ++r) {
    const double share = use[static_cast<std::size_t>(r)];
    if (static_cast<Resource>(r) == Resource::file && share == 0.0) continue;  // few plans have any
    text += fmt::format("{}{} {:.0f}%", text.empty() ? "" : ", ", name_of(static_cast<Resource>(r)), 100.0 * share);
  }
  return text;
}

/// The policies that were compared. Only the way of keeping activations that was chosen has any.
std::string text_of_candidates(const Planned& planned) {
  constexpr std::size_t shown = 8;
  std::string text = fmt::format("policies compared, with activations {}{}; \"or more\": given up once it was slower\n",
                                 planned.activations, planned.order.empty() ? "" : " and this order");
  std::size_t count = 0;
  std::size_t refused = 0;
  for (const Candidate& c : planned.candidates) {
    if (!c.fits) ++refused;
    if (!c.fits || count++ >= shown) continue;
    text += fmt::format("{} {:<30}{:>9.4f} s {:<8} {} of device memory\n", count == 1 ? "chosen" : "  then",
                        c.improved ? "auto, a division of its own" : c.policy.text(), c.simulation.step_seconds,
                        c.simulation.given_up ? "or more" : "", format_bytes(c.device_bytes));
  }
  if (count > shown) text += fmt::format("{} others are slower\n", count - shown);
  if (refused > 0) text += fmt::format("{} of {} do not fit\n", refused, planned.candidates.size());
  return text;
}

std::string explanation(const Planned& planned) {
  const Simulation& s = *planned.predicted;
  std::string text = fmt::format("share of the step in which each part is busy: {}\n", text_of_use(s.use));
  if (!planned.order.empty()) text += fmt::format("order of micro-batches: {}\n", planned.order);
  text += table_of(*planned.modules);
  text += text_of_candidates(planned);
  if (planned.closed_forms) text += text_of(*planned.closed_forms);
  if (!planned.upgrades.empty()) text += "the same step on other hardware:\n";
  for (const Upgrade& u : planned.upgrades) {
    text += fmt::format("  {:<35}{:>9.4f} s  {:+.0f}%\n", u.what, u.step_seconds,
                        std::round(100.0 * (u.step_seconds / s.step_seconds - 1.0)) + 0.0);  // no -0
  }
  return text;
}

/// None where the policy is fixed. The CPU's kernel writes the weight as it updates: casting takes no time of its own.
std::optional<ClosedForms> closed_forms(const TrainConfig& config, const Choice& choice,
                                        const MachineProfile& profile) {
  if (config.policy.kind != Policy::Kind::automatic) return std::nullopt;
  const double link = std::min(profile.to_device.value, profile.to_host.value) / sizeof(float);
  const double cpu_update = profile.cpu_update.value / profile.devices.value;
  constexpr double at_once = std::numeric_limits<double>::infinity();
  return ClosedForms{choice.closed_form_cpu_share,
                     published_stride(link, profile.device_update.value, cpu_update, at_once)};
}

[[noreturn]] void refuse_unpredicted(std::string_view flag) {
  throw UsageError(flag, "this machine has not been calibrated", "run tandem calibrate, or give --profile");
}

std::int64_t tokens_of(const PlanFlags& flags) {
  if (flags.tokens.empty()) return 0;
  try {
    const std::int64_t tokens = parse_count(flags.tokens);
    if (tokens > 0) return tokens;
  } catch (const UsageError& error) {
    throw UsageError("--tokens", error.what());
  }
  throw UsageError(fmt::format("--tokens {}", flags.tokens), "out of range", "give at least 1");
}

/// Seconds of a step whose updates run ahead of the norm and stay; none where none can.
std::optional<double> confirmed_seconds(const RunPlan& run) {
  if (!run.plan.speculates()) return std::nullopt;
  const RunPrediction& known = *run.prediction;
  if (run.plan.counts_on_speculation()) return known.choice.simulation.step_seconds;
  constexpr std::int64_t pieces = 20'000;  // a second at most
  Plan ahead = run.plan;
  ahead.speculate = Speculate::on;
  return simulate(run.layout, ahead, known.profile, known.compute,
                  {.micro_batches = run.options.max_micro_batches, .coarse_pieces = pieces})
      .step_seconds;
}

Planned planned_of(const PlanFlags& flags, const TrainConfig& config, const RunPlan& run) {
  Planned planned;
  planned.plan = run.plan;
  planned.memory = run.all_memory();
  planned.table = run.table();
  planned.saving = run.saving;
  planned.checkpoints = run.checkpoints;
  planned.order = run.order;
  planned.reference = run.reference;
  planned.activations = activations_of(run.model_config, run.shape);
  planned.parameters = run.layout.parameter_count();
  if (!run.prediction) {
    if (flags.explain) refuse_unpredicted("--explain");
    return planned;
  }
  const RunPrediction& known = *run.prediction;
  planned.predicted = known.choice.simulation;
  planned.confirmed_seconds = confirmed_seconds(run);
  planned.candidates = known.choice.candidates;
  planned.closed_forms = closed_forms(config, known.choice, known.profile);
  if (flags.explain) {
    planned.upgrades = upgrades(run.layout, run.options, run.facts, known.profile, known.compute, run.plan);
    planned.modules = step_modules(run, config.sequences);
  }
  return planned;
}

constexpr RunPurpose purpose_of_plan{.training = true, .saves = true};

Planned plan_elsewhere(const PlanFlags& flags, const TrainConfig& config, const ModelConfig& model) {
  const ProfileMachine elsewhere = machine_of(find_profile(flags.profile), config);
  return planned_of(flags, config, plan_run(config, model, purpose_of_plan, elsewhere.machine));
}

Planned plan_here(const PlanFlags& flags, const TrainConfig& config, const ModelConfig& model) {
  const RunSetup run = set_up_run(config, model, purpose_of_plan);
  Planned planned = planned_of(flags, config, run);
  planned.doubts = run.doubts;
  return planned;
}

/// Throws PlanError where no plan fits.
void require_fit(const PlanFlags& flags, const TrainConfig& config, const ModelConfig& model) {
  RunPurpose purpose = purpose_of_plan;
  purpose.predicts = false;
  if (flags.profile.empty()) {
    set_up_run(config, model, purpose);
    return;
  }
  require_fit(config, model, purpose, machine_of(find_profile(flags.profile), config).machine);
}

// -- fit -------------------------------------------------------------------------------------------------

/// The largest n in [1, most] for which `fits`, which must hold for all smaller ones; 0: not even 1.
std::int64_t largest_that(std::int64_t most, const std::function<bool(std::int64_t)>& fits) {
  std::int64_t low = 0;
  std::int64_t high = 1;
  while (high <= most && fits(high)) {
    low = high;
    high *= 2;
  }
  high = std::min(high, most + 1);
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    (fits(middle) ? low : high) = middle;
  }
  return low;
}

/// The largest number of tokens of a sequence for which `fits`: a multiple of 64, as is usual, or all of `most`; fewer
/// than 64 where not even those fit.
std::int64_t longest_that(std::int64_t most, const std::function<bool(std::int64_t)>& fits) {
  constexpr std::int64_t step = 64;
  const auto tokens = [&](std::int64_t steps) { return std::min(steps * step, most); };
  const std::int64_t steps = largest_that((most + step - 1) / step, [&](std::int64_t n) { return fits(tokens(n)); });
  return steps > 0 ? tokens(steps) : largest_that(std::min(most, step) - 1, fits);
}

/// Changes the configuration to the largest that fits, and says which. Throws PlanError where none does.
std::string fit(const PlanFlags& flags, TrainConfig& config, ModelSource& source) {
  std::string why;  // the last that does not fit does not
  const auto fits = [&](const TrainConfig& c, const ModelConfig& model) {
    try {
      require_fit(flags, c, model);
      return true;
    } catch (const PlanError& error) {
      why = error.what();
      return false;
    }
  };
  const auto refuse = [&](std::string_view what) {
    throw PlanError(fmt::format("--fit {}", flags.fit), fmt::format("not even {} fits: {}", what, why), "");
  };
  const auto fits_with = [&](std::int64_t TrainConfig::*member, std::int64_t value) {
    TrainConfig c = config;
    c.*member = value;
    return fits(c, source.config);
  };
  if (flags.fit == "micro-batch") {
    constexpr std::int64_t most = 4096;
    config.micro_batch = largest_that(most, [&](std::int64_t n) { return fits_with(&TrainConfig::micro_batch, n); });
    if (config.micro_batch == 0) refuse("one sequence");
    return fmt::format("--micro-batch {}", config.micro_batch);
  }
  if (flags.fit == "seq-len") {
    config.seq_len = longest_that(source.config.positions,
                                  [&](std::int64_t tokens) { return fits_with(&TrainConfig::seq_len, tokens); });
    if (config.seq_len == 0) refuse("a sequence of one token");
    return fmt::format("--seq-len {}", config.seq_len);
  }
  std::vector<std::pair<std::int64_t, std::string>> models;
  for (const std::string& name : builtin_models()) {
    models.emplace_back(frozen_layout(builtin_model(name), "").parameter_count(), name);
  }
  std::sort(models.rbegin(), models.rend());
  for (const auto& [parameters, name] : models) {
    TrainConfig c = config;
    ModelSource candidate;
    candidate.config = builtin_model(name);
    take_adapters(c, candidate);
    const ModelConfig& model = candidate.config;
    const bool has_blocks = !c.recompute || c.recompute->blocks == all_blocks || c.recompute->blocks <= model.layers;
    if (c.seq_len > model.positions || !has_blocks) continue;
    c.seq_len = sequence_length(c, model);
    if (!fits(c, model)) continue;
    config = c;
    source.config = model;
    return "--model " + name;
  }
  refuse("the smallest built-in model");
  return {};
}

/// Sets the sequence length of a run, and what its data says of its sequences, where that is given and here.
void take_sequences_of(TrainConfig& config, const ModelSource& source) {
  if (!config.data.empty() || !config.mix.empty()) {
    try {
      const TrainingData data = open_training_data(config, source);
      std::unique_ptr<TokenSource> eval_data;
      if (!config.eval_data.empty()) eval_data = open_tokens(config.eval_data, config, source, "--eval-data");
      take_sequences(config, source.config, data, eval_data.get());
      config.sequences.has_scores = has_scores(config.data);
      return;
    } catch (const Error& error) {
      spdlog::warn("the data is not read, so that sequences are as without it: {}", error.what());
    }
  }
  config.seq_len = sequence_length(config, source.config);
}

int plan(const PlanFlags& flags) {
  const std::int64_t tokens = tokens_of(flags);
  TrainConfig config = flags.config.config();
  if (flags.fit == "model" && config.model.empty()) config.model = builtin_models().front();
  check_config(config);
  ModelSource source = find_model(config.model, {.from_scratch = config.from_scratch, .out = config.out});
  if (flags.fit == "model" && !config.adapter.empty()) {
    throw UsageError("--fit model", "an adapter is of one model", "name it, and leave out --fit model");
  }
  if (flags.fit != "model") {
    take_adapters(config, source);
    settle_reference(config, source);
  }
  if (source.config.stored_code != WeightCode::none) check_weights(source, trained_layout(config, source.config));
  if (source.adapter) check_adapter(source, trained_layout(config, source.config));
  // With --fit model the sequence length depends on the model that is found.
  if (flags.fit != "model") take_sequences_of(config, source);
  try {
    const std::string fitted = flags.fit.empty() ? std::string() : fit(flags, config, source);
    Planned planned =
        flags.profile.empty() ? plan_here(flags, config, source.config) : plan_elsewhere(flags, config, source.config);
    planned.model = source.config.name;
    planned.tokens = tokens;
    if (tokens > 0 && !planned.predicted) refuse_unpredicted("--tokens");
    planned.all_tokens = static_cast<double>(config.micro_batch * config.grad_accum * config.seq_len);
    planned.targets = planned.all_tokens * config.sequences.target_share;
    if (flags.json) {
      print_output(json_document(json_of(planned, fitted)));
      return 0;
    }
    std::string text = fmt::format("{}, {} parameters, sequences of {}, micro-batch {}\n{}", planned.model,
                                   format_count(planned.parameters), config.seq_len, config.micro_batch, planned.table);
    if (!fitted.empty()) text = fmt::format("the largest that fits: {}\n", fitted) + text;
    text += planned.saving.text();
    if (planned.predicted) {
      text += time_table(planned);
      if (planned.tokens > 0) {
        text +=
            fmt::format("{} tokens{:>{}}   at this rate, without evaluation and saving\n", format_count(planned.tokens),
                        format_duration(seconds_of_tokens(planned)), 33 - format_count(planned.tokens).size());
      }
      if (flags.explain) text += explanation(planned);
    } else {
      text += "no prediction: run `tandem calibrate` once, or give --profile\n";
    }
    print_output(text);
  } catch (const PlanError& error) {
    if (flags.json) print_output(json_document(json_of(error, source.config.name)));
    throw;
  }
  return 0;
}

}  // namespace

CommandFunction add_plan_command(CLI::App& program) {
  auto* command =
      program.add_subcommand("plan", "memory and time plan of a run; allocates nothing; takes the flags of train");
  auto flags = std::make_shared<PlanFlags>();
  flags->config.add_to(*command);
  for (const char* name : {"--steps", "--epochs"}) {
    command->get_option(name)->description(
        "as for train, whose line may stand here whole. Default: a plan does without");
  }
  command->get_option("--data")->description(
      "data of the run: where it is in rows, sequences are as long as they are. Default: a plan does without");
  command->get_option("--mix")->description(
      "the same of several sources with weights. Default: none. Example: --mix a.bin=0.7,b.bin=0.3");
  add_profile_option(
      *command, flags->profile,
      "plans for the machine of this profile, a file or the name of a shipped one, whose system keeps 3 GiB and a 64th "
      "of the host's memory unless --host-memory is given. Default: this machine, as calibrated. Example: --profile "
      "24gb-pcie4");
  command
      ->add_option("--tokens", flags->tokens,
                   "says how long so many target tokens take, as predicted. Default: no tokens. Example: --tokens 10M")
      ->type_name("TOKENS");
  command->add_flag("--explain", flags->explain,
                    "says why: what is used how much, the runners-up, what would help most. Default: off");
  command
      ->add_option("--fit", flags->fit,
                   "finds the largest micro-batch, seq-len or built-in model that fits. Example: --fit micro-batch")
      ->type_name("WHAT")
      ->check(CLI::IsMember({"micro-batch", "seq-len", "model"}));
  command->add_flag("--json", flags->json, "one JSON object on standard output. Default: off");
  command->footer("Example: tandem plan --model llama3.1-8b --seq-len 2048 --profile 24gb-pcie4 --explain");
  return [flags](const ProgramContext&) { return plan(*flags); };
}

}  // namespace tandem
