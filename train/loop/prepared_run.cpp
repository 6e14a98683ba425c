#include "train/loop/prepared_run.hpp"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "comm/metrics_server.hpp"
#include "core/base/error.hpp"
#include "core/base/version.hpp"
#include "core/host/topology.hpp"
#include "train/config/units.hpp"
#include "train/hf/checkpoint_match.hpp"
#include "train/hf/trained_layout.hpp"
#include "train/loop/reference.hpp"
#include "train/loop/resume_point.hpp"
#include "train/loop/run_facts.hpp"
#include "train/report/record_scores.hpp"
#include "train/report/run_directory.hpp"
#include "train/setup/reference_choice.hpp"
#include "train/setup/run_request.hpp"
#include "train/setup/training_data.hpp"

namespace tandem {
namespace {

/// Data that a checkpoint was trained on, for people.
std::string text_of(const std::vector<CheckpointMixPart>& mix) {
  if (mix.empty()) return "--data alone";
  std::string shares;
  for (const CheckpointMixPart& part : mix) shares += fmt::format("{}{:.6g}", shares.empty() ? "" : " to ", part.share);
  return fmt::format("a mix of {}", shares);
}

/// Peak learning rate where none is given.
double default_lr(const TrainConfig& config, const ModelSource& source) {
  const bool dpo = config.objective == Objective::dpo;
  if (source.config.lora) return dpo ? 1e-5 : 2e-4;
  if (!source.loads_weights()) return 3e-4;
  return dpo ? 1e-6 : 2e-5;
}

}  // namespace

PreparedRun::PreparedRun(TrainRequest its_request) : request(std::move(its_request)) {
  check_config(config());
  join();
  processes->or_fail([this] { prepare(); });
}

/// Finds the other processes. From then on the first one alone speaks.
void PreparedRun::join() {
  if (!request.launch) {
    processes = std::make_unique<Processes>();
    return;
  }
  static_cast<void>(config_of_rank(config(), request.launch->rank.count));
  log = std::make_unique<RankLog>();
  processes = std::make_unique<Processes>(*request.launch, facts_of(config()));
  if (!processes->is_first()) log->mute();
}

void PreparedRun::prepare() {
  check_request();
  open_model();
  open_data();
  resolve();
  take_progress();
  setup = set_up_run(config(), source.config,
                     {.training = true, .saves = !config().out.empty(), .resumes = checkpoint != nullptr},
                     {.processes = processes->several() ? processes.get() : nullptr});
  if (setup.reference) {
    request.config.dpo_reference = setup.reference->in_step ? DpoReference::step : DpoReference::before;
  }
  if (processes->several()) processes->agree(facts_of(*this));
  if (setup.checkpoints && record.step < config().steps) setup.checkpoints->require(config().on_save_failure);
  check_compute_key();
}

/// The model, and the checkpoint to go on from.
void PreparedRun::open_model() {
  source = find_model(config().model, {.from_scratch = config().from_scratch, .out = config().out});
  if (config().from_scratch) {
    source.weights.reset();
    source.checkpoint.reset();
    source.on_top.clear();
  }
  static_cast<void>(sequence_length(config(), source.config));  // refuses one beyond the positions
  static_cast<void>(recompute_of(config(), source.config));     // refuses more blocks than there are
  source.config.validate();
  checkpoint = choose_checkpoint();
  const bool over_base = checkpoint && !checkpoint->manifest().base_format.empty();
  if (over_base) check_function(*checkpoint, source.config);  // before adapters are refused that do not fit it
  if (checkpoint) take_patterns(request.config, *checkpoint);
  take_adapters(request.config, source, /*opens=*/checkpoint == nullptr || config().lora.rank == 0);
  settle_reference(request.config, source);
  take_reference_of_checkpoint();
  const ParameterLayout layout = trained_layout(config(), source.config);
  check_weights(source, layout);
  check_adapter(source, layout);
  if (checkpoint) check_resumable(*checkpoint, source.config, layout, config().state);
}

/// The checkpoint that the first process finds, which the others must see too.
std::unique_ptr<Checkpoint> PreparedRun::choose_checkpoint(std::int64_t before) {
  if (!processes->several()) return find_checkpoint(request, before);
  std::unique_ptr<Checkpoint> found;
  if (processes->is_first()) found = find_checkpoint(request, before);
  const std::string name =
      processes->of_first("checkpoint", found ? found->directory().filename().string() : std::string());
  if (!processes->is_first() && !name.empty()) found = open_chosen(request, name);
  return found;
}

/// A run that goes on has its reference as it began, where nothing else is asked for: of what it did not keep then its
/// steps alone can compute it.
void PreparedRun::take_reference_of_checkpoint() {
  if (!checkpoint || config().objective != Objective::dpo) return;
  const std::filesystem::path run = checkpoint->directory().parent_path().parent_path(), file = run / reference_file,
                              adapter = run / reference_adapter_folder;
  std::error_code hidden;
  const bool kept = std::filesystem::exists(file, hidden);
  DpoReference& when = request.config.dpo_reference;
  const bool needs_adapter =
      std::exchange(request.config.reference_has_adapter, std::filesystem::exists(adapter, hidden));
  if (!steps_compute_reference(config(), source)) return;
  if (when == DpoReference::before && !kept) {
    throw InputError("--dpo-reference before", fmt::format("{} is missing", file.string()),
                     "give --dpo-reference step, which computes the same in each step");
  }
  if (when == DpoReference::automatic) when = kept ? DpoReference::before : DpoReference::step;
  if (when == DpoReference::step && needs_adapter && !config().reference_has_adapter) {
    throw InputError("--dpo-reference step", fmt::format("{} is missing", adapter.string()),
                     kept ? "leave it out, as the reference was computed before the first step" : "put it back");
  }
}

void PreparedRun::pass_over_checkpoint() {
  checkpoint = choose_checkpoint(checkpoint->manifest().step);
  if (!checkpoint && !source.adapter) take_adapters(request.config, source);  // it begins anew, with their values
  if (checkpoint) check_resumable(*checkpoint, source.config, setup.layout, config().state);
  take_progress();
  check_compute_key();
}

void PreparedRun::check_request() const {
  MetricsServer::check_address(config().metrics_address);
  if (config().data.empty() && config().mix.empty())
    throw UsageError("--data", "missing", "for example --data corpus/");
  if (config().steps == 0 && config().epochs == 0.0)
    throw UsageError("--steps", "missing", "for example --steps 1000, or --epochs 1");
  for (const auto& [flag, given] :
       {std::pair("--keep-best", config().keep_best), {"--eval-every", config().eval_every > 0}}) {
    if (given && config().eval_data.empty()) throw UsageError(flag, "there is no --eval-data", "give some");
  }
  if (request.resume && request.resume_from.empty() && config().out.empty()) {
    throw UsageError("--resume", "there is no --out to resume", "give --out, or name a checkpoint");
  }
  if (config().out.empty() || !processes->is_first()) return;
  refuse_locked(config().out);
  if (!request.resume) refuse_held(config().out);
}

void PreparedRun::open_data() {
  TrainConfig& own = request.config;
  data = open_training_data(own, source);
  if (!own.eval_data.empty()) eval_data = open_tokens(own.eval_data, own, source, "--eval-data");
  take_sequences(own, source.config, data, eval_data.get());
  own.sequences.has_scores = has_scores(own.data);
  for (std::size_t i = 0; i < data.sources.size(); ++i) {
    parts_.push_back({require_windows(*data.sources[i], own.seq_len, data.names[i]) / rows_at_once(), data.shares[i]});
    if (own.mix.empty()) continue;
    spdlog::info("{}: {:.3g}% of the windows; it has {}", data.names[i], 100.0 * data.shares[i], parts_[i].windows);
  }
  if (eval_data) require_windows(*eval_data, own.seq_len, "--eval-data");
}

void PreparedRun::resolve() {
  TrainConfig& own = request.config;
  const std::int64_t per_step = own.micro_batch * own.grad_accum / rows_at_once();
  if (own.steps == 0) {
    std::int64_t windows = 0;
    for (const MixPart& part : parts_) windows += part.windows;
    const double steps = std::ceil(own.epochs * static_cast<double>(windows) / static_cast<double>(per_step));
    own.steps = std::max<std::int64_t>(1, static_cast<std::int64_t>(steps));
    epochs_ = std::exchange(own.epochs, 0.0);
  }
  if (!own.lr) own.lr = default_lr(own, source);
  if (!own.min_lr) own.min_lr = *own.lr / 10.0;
  if (*own.min_lr > *own.lr) throw UsageError("--min-lr", "it is above --lr", "give a smaller one");
  schedule = {own.lr_schedule, *own.lr, *own.min_lr, own.warmup_steps, own.decay_steps, own.steps};
}

/// Sets the progress of the run: the checkpoint's, or the beginning.
void PreparedRun::take_progress() {
  sampler.emplace(parts_, config().seed);
  const Manifest beginning;
  const Manifest& m = checkpoint ? checkpoint->manifest() : beginning;
  if (checkpoint) {
    if ((m.token_kind == "bytes") != data.bytes()) {
      throw InputError("--data",
                       fmt::format("the checkpoint was trained on {}, this is {}", m.token_kind,
                                   data.bytes() ? "text" : "token ids"),
                       "resume with the same --data");
    }
    take_place(m);
    check_schedule(m);
  }
  record = RunRecord::of(m);
  if (checkpoint) record.resumed_from = m.step;
}

/// Takes the checkpoint's place in the data, which must be the data that it was trained on.
void PreparedRun::take_place(const Manifest& m) {
  MixSampler::State place;  // summed as unsigned numbers, as a checkpoint is not believed
  place.drawn = static_cast<std::int64_t>(static_cast<std::uint64_t>(m.sampler_epoch) *
                                              static_cast<std::uint64_t>(m.sampler_windows) +
                                          static_cast<std::uint64_t>(m.sampler_position));
  bool same_shares = m.mix.empty() || m.mix.size() == parts_.size();
  for (std::size_t i = 0; i < m.mix.size(); ++i) {
    const CheckpointMixPart& part = m.mix[i];
    place.sources.push_back({m.seed, part.windows, part.epoch, part.position});
    same_shares = same_shares && part.share == parts_[i].share;
  }
  if (m.mix.empty()) place.sources.push_back({m.seed, m.sampler_windows, m.sampler_epoch, m.sampler_position});
  if (place.sources.size() != parts_.size() || !same_shares) {
    throw InputError(config().mix.empty() ? "--data" : "--mix",
                     fmt::format("checkpoint {} was trained on {}", checkpoint->directory().string(), text_of(m.mix)),
                     "resume with the same sources and weights");
  }
  sampler->restore(place);
  if (m.data_digest.empty() || m.data_digest == data.digest()) return;
  if (m.data_digest.substr(0, m.data_digest.find(';')) == data.digest().substr(0, data.digest().find(';'))) {
    throw InputError("--document-attention",
                     fmt::format("checkpoint {} was trained {} it", checkpoint->directory().string(),
                                 config().document_attention ? "without" : "with"),
                     "resume as it was begun; for another run begin one with --model CHECKPOINT and another --out");
  }
  throw InputError(
      config().mix.empty() ? "--data" : "--mix",
      fmt::format("its content is other than what checkpoint {} was trained on", checkpoint->directory().string()),
      "resume with the data as it was; for other data begin a run with --model CHECKPOINT and another --out");
}

/// A cosine over more steps than before, for one, is another from its first step on.
void PreparedRun::check_schedule(const Manifest& manifest) const {
  if (manifest.step > config().steps) {
    const std::string asked = epochs_ > 0.0 ? fmt::format("--epochs {}, which is {} steps", epochs_, config().steps)
                                            : fmt::format("--steps {}", config().steps);
    spdlog::warn("{}: the run has {} already", asked, manifest.step);
  }
  if (manifest.step >= config().steps) return;  // it goes on by none
  const auto before = Schedule::of_text(manifest.schedule);
  if (!before || schedule.agrees_with(*before, manifest.step)) return;
  spdlog::warn(
      "the learning rate has followed another schedule so far ({}), and goes on by this one ({}): the run is not one "
      "that had these flags from the start; for a run that can be made longer give it --decay-steps, or --lr-schedule "
      "constant",
      before->brief(), schedule.brief());
}

void PreparedRun::check_compute_key() const {
  if (!checkpoint || checkpoint->manifest().compute_key == setup.compute_key()) return;
  const std::string why = fmt::format("checkpoint {} was made with another compute_key ({})",
                                      checkpoint->directory().string(), checkpoint->manifest().compute_key);
  if (config().strict) throw InputError("--strict", why, "resume where it was made");
  spdlog::warn("{}: the run goes on, but its bits may differ", why);
}

std::string PreparedRun::plan_text() const {
  const std::size_t host = read_topology().memory_bytes;
  return fmt::format("tandem {} | {}, {} parameters | {}, ceiling {} | host {}\n{}{}", version, setup.model_config.name,
                     format_count(setup.layout.parameter_count()), setup.device_names(),
                     format_bytes(setup.plan.device_memory), host == 0 ? "unknown" : format_bytes(host), setup.table(),
                     setup.saving.text());
}

}  // namespace tandem
