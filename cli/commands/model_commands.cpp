// tandem eval, digest, export: what is done with a trained model, but for text.
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <system_error>

#include "cli/common/commands.hpp"
#include "cli/common/flags.hpp"
#include "cli/common/trained_model.hpp"
#include "core/base/error.hpp"
#include "core/base/json_text.hpp"
#include "data/window_sampler.hpp"
#include "io/checkpoint.hpp"
#include "models/hf/hf_config.hpp"
#include "train/config/units.hpp"
#include "train/hf/adapter_source.hpp"
#include "train/hf/hf_export.hpp"
#include "train/hf/lora_modules.hpp"
#include "train/hf/model_source.hpp"
#include "train/hf/trained_layout.hpp"
#include "train/hf/weights_digest.hpp"
#include "train/loop/run_paths.hpp"
#include "train/setup/training_data.hpp"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

/// A run of forwards alone.
RunSetup forward_setup(const TrainConfig& config, const ModelSource& source) {
  return set_up_run(config, source.config, {.training = false, .saves = false});
}

// -- eval ------------------------------------------------------------------------------------------------

struct EvalFlags {
  ConfigFlags config;
  std::string source;
  bool json = false;
};

/// Throws UsageError where the last word of --data, which takes all that follow it, is a model, and none is named.
void refuse_model_as_data(const TrainConfig& config) {
  if (!config.model.empty() || config.data.size() < 2) return;
  const fs::path last = config.data.back();
  std::error_code ignored;
  for (const char* name : {"config.json", "checkpoints", "manifest.json", "adapter_config.json"}) {
    if (!fs::exists(last / name, ignored)) continue;
    throw UsageError("--model", fmt::format("missing, and {} is read as more of --data", last.string()),
                     fmt::format("name the model first: eval {} --data ...", last.string()));
  }
}

int eval(const EvalFlags& flags) {
  require_source("eval", flags.source);
  TrainConfig config = flags.config.config();
  if (flags.source.empty()) {
    refuse_model_as_data(config);
    require_model(config);
  }
  if (config.data.empty()) throw UsageError("--data", "missing", "for example --data held-out.txt");
  ModelSource source = find_named("eval", flags.source, config);
  take_adapters(config, source);
  static_cast<void>(sequence_length(config, source.config));  // refuses one beyond the positions
  check_weights(source, forward_layout(source.config));
  const auto data = open_tokens(config.data, config, source, "--data", DataUse::evaluation);
  take_sequences(config, source.config, *data, "--data");
  RunSetup setup = forward_setup(config, source);
  LoadedModel model(setup, nullptr);
  load_weights(model, source, setup);
  const EvalResult result = model.evaluate(*data).value();
  if (flags.json) {
    print_output(json_document(Json{{"loss", result.loss}, {"tokens", result.tokens}, {"windows", result.windows}}));
  } else {
    print_output(fmt::format("loss {:.6f} over {} tokens in {} windows of {}\n", without_nan_sign(result.loss),
                             result.tokens, result.windows, config.seq_len));
  }
  return 0;
}

// -- digest ----------------------------------------------------------------------------------------------

bool is_run(const fs::path& directory) {
  std::error_code ignored;
  return !is_checkpoint(directory) && fs::is_directory(directory / "checkpoints", ignored);
}

/// Newest good checkpoint of a run.
std::unique_ptr<Checkpoint> newest_of(const fs::path& run, CheckpointCheck check) {
  auto checkpoint = newest_checkpoint(
      run / "checkpoints", [](const fs::path&, const std::string& why) { spdlog::warn("passed over: {}", why); },
      {.check = check});
  if (!checkpoint) throw InputError(fmt::format("run {}", run.string()), "it holds no good checkpoint");
  return checkpoint;
}

struct DigestFlags {
  std::string source;
  bool json = false;
};

int digest(const DigestFlags& flags) {
  const fs::path directory = flags.source;
  const auto checkpoint =
      is_run(directory) ? newest_of(directory, CheckpointCheck::state) : std::make_unique<Checkpoint>(directory);
  const std::string text = checkpoint->state_digest();
  const Manifest& manifest = checkpoint->manifest();
  if (flags.json) {
    const Json json{{"state_digest", text},
                    {"step", manifest.step},
                    {"compute_key", manifest.compute_key},
                    {"checkpoint", checkpoint->directory().string()}};
    print_output(json_document(json));
  } else {
    print_output(text + "\n");
  }
  return 0;
}

// -- export ----------------------------------------------------------------------------------------------

struct ExportFlags {
  std::string source;
  std::string to;
  std::string model;
  std::string dtype = "bf16";
  std::string shard_size = "5GiB";
  std::string adapter;
  bool merged = false;
  bool best = false;
  bool json = false;
};

/// Checkpoint of a run with the lowest loss on its evaluation data.
struct BestCheckpoint {
  fs::path directory;
  std::int64_t step = 0;
  double loss = 0.0;
};

BestCheckpoint best_of(const fs::path& run) {
  if (!is_run(run)) {
    throw UsageError(fmt::format("export {} --best", run.string()),
                     "it is no run, which would know its best checkpoint",
                     "name the folder of a run, or leave out --best");
  }
  const auto newest = newest_of(run, CheckpointCheck::all_but_state);
  const Manifest& manifest = newest->manifest();
  if (manifest.best_step == 0 || !manifest.best_eval_loss) {
    throw UsageError(fmt::format("export {} --best", run.string()), "the run has kept no best checkpoint",
                     "train with --eval-data, --eval-every and --keep-best, or leave out --best");
  }
  fs::path best = run / "checkpoints" / checkpoint_name(manifest.best_step);
  std::error_code ignored;
  if (!fs::exists(best, ignored)) {
    throw InputError(fmt::format("export {} --best", run.string()),
                     fmt::format("its best checkpoint, {} with eval loss {:.4f}, is not there any more", best.string(),
                                 *manifest.best_eval_loss),
                     "put it back, or leave out --best for the newest");
  }
  return {std::move(best), manifest.best_step, *manifest.best_eval_loss};
}

/// Throws WriteError where the folder is taken.
void require_free(const std::string& to) {
  std::error_code ignored;
  if (!fs::exists(to, ignored) || (fs::is_directory(to) && fs::is_empty(to))) return;
  throw WriteError(fmt::format("--to {}", to), "it exists and is not an empty folder", "name another one");
}

/// Says how many parameters were written, and of which checkpoint where that was chosen.
void report_export(const ExportFlags& flags, std::int64_t parameters, std::string_view as,
                   const std::optional<BestCheckpoint>& best) {
  if (flags.json) {
    Json json{{"directory", flags.to}, {"dtype", flags.dtype}, {"parameters", parameters}, {"as", as}};
    if (best) json["best"] = {{"step", best->step}, {"eval_loss", best->loss}};
    return print_output(json_document(json));
  }
  const std::string chosen =
      best ? fmt::format(", of step {}, eval loss {:.4f}", best->step, best->loss) : std::string();
  print_output(fmt::format("{} parameters{} as {} in {}{}\n", format_count(parameters),
                           as == "adapter" ? " of an adapter for PEFT" : "", flags.dtype, flags.to, chosen));
}

/// Base that the description of an exported adapter names. One that --model names must be the one that it was trained
/// over: throws InputError.
std::string base_for_export(const fs::path& path, const ExportFlags& flags, const AdapterSource& adapter) {
  if (flags.model.empty()) return adapter.description().base;
  TrainConfig config;
  config.model = flags.model;
  const ModelSource source = find_named("export", path.string(), config);
  static_cast<void>(weights_digest(source, forward_layout(source.config), 0));  // reads all values, which are compared
  return absolute_path(flags.model);
}

/// The adapter of a run, without the base that it belongs to.
std::int64_t export_adapter_of(const fs::path& path, const ExportFlags& flags, ExportType type) {
  const auto adapter = open_adapter(path, "export");
  if (adapter->checkpoint() == nullptr) {
    throw UsageError(fmt::format("export {}", path.string()), "it is an adapter of PEFT's already",
                     "--merged makes a whole model of it");
  }
  const Manifest& manifest = adapter->checkpoint()->manifest();
  ModelConfig config = parse_hf_config(manifest.model_config, manifest.model_name);
  const LoraOptions& options = adapter->description().options;
  config.lora = lora_config(config, options, "target_modules");
  TrainConfig described;
  described.lora = options;
  const ParameterLayout layout = trained_layout(described, config);
  adapter->check(config, layout);
  require_free(flags.to);
  const std::vector<fs::path> beside = adapter->checkpoint()->files_beside();
  std::int64_t parameters = 0;
  for (const Parameter* p : layout.owned_parameters()) parameters += p->options.trainable ? p->count : 0;
  export_adapter(flags.to, {.config = config,
                            .layout = layout,
                            .options = options,
                            .base = base_for_export(path, flags, *adapter),
                            .type = type,
                            .beside = {beside.begin(), beside.end()},
                            .values = [&](const Parameter& p, std::int64_t first, std::span<float> values) {
                              adapter->read(config, p, first, values);
                            }});
  return parameters;
}

/// Format of the frozen weights that a source's state was trained over; "bf16": as the model's own.
std::string base_format_of(const ModelSource& source) {
  if (source.adapter && source.adapter->checkpoint() != nullptr)
    return source.adapter->checkpoint()->manifest().base_format;
  return source.on_top.empty() ? "bf16" : source.on_top.back()->manifest().base_format;
}

/// Warns where the model that is written is not what was trained, as frozen weights were in another format.
void warn_of_base_format(const ModelSource& source) {
  if (source.config.stored_code != WeightCode::none) {
    return spdlog::warn(
        "{}: its linear layers are NF4 by bitsandbytes; written are the values that their codes stand for, not those "
        "that were quantized",
        source.on_top.empty() ? source.base : source.on_top.front()->manifest().base);
  }
  const std::string format = base_format_of(source);
  if (format == "bf16") return;
  spdlog::warn("{} trained over weights in {}, and are {} the original ones: the loss differs",
               source.adapter ? "the adapters were" : "parameters were", format,
               source.adapter ? "added to" : "written beside");
}

std::int64_t export_whole(const std::string& name, const ExportFlags& flags, ExportType type, std::size_t shard_bytes) {
  TrainConfig config;
  config.model = flags.model;
  config.adapter = flags.adapter;
  ModelSource source = find_named("export", name, config);
  take_adapters(config, source);
  if (flags.merged && !source.adapter) {
    throw UsageError(fmt::format("export {} --merged", name), "it has no adapter to merge", "leave out --merged");
  }
  const ModelConfig plain = without_adapters(source.config);
  const ParameterLayout layout = forward_layout(plain), all = forward_layout(source.config);
  const bool over_base = source.adapter || !source.on_top.empty();
  ParameterValues values = initial_values(source, over_base ? all : layout, 0);
  warn_of_base_format(source);
  if (source.adapter) values = merged_values(source.config, all, std::move(values));
  require_free(flags.to);
  export_hf(flags.to, {.config = plain,
                       .layout = layout,
                       .bytes = source.bytes,
                       .type = type,
                       .shard_bytes = shard_bytes,
                       .beside = source.beside,
                       .values = values});
  return layout.parameter_count();
}

/// Whether a path is a run or checkpoint of adapters, or a folder of PEFT's.
bool holds_adapter(const fs::path& path) {
  const bool checkpoints = is_checkpoint(path) || is_run(path);
  if (!checkpoints) return is_peft_folder(path);
  const auto checkpoint = is_checkpoint(path) ? std::make_unique<Checkpoint>(path, CheckpointCheck::all_but_state)
                                              : newest_of(path, CheckpointCheck::all_but_state);
  return !checkpoint->manifest().adapter.empty();
}

int export_model(const ExportFlags& flags) {
  const std::size_t shard_bytes = value_of("--shard-size", [&] { return parse_size(flags.shard_size); });
  if (shard_bytes == 0) throw UsageError("--shard-size 0", "out of range", "for example --shard-size 5GiB");
  std::optional<BestCheckpoint> best;
  if (flags.best) best = best_of(flags.source);
  const std::string source = best ? best->directory.string() : flags.source;
  const ExportType type = flags.dtype == "fp32" ? ExportType::fp32 : ExportType::bf16;
  if (!flags.adapter.empty() && !flags.merged) {
    throw UsageError("--adapter", "it is for --merged", "give both, or name the adapter's run alone");
  }
  const bool as_adapter = !flags.merged && holds_adapter(source);
  const std::int64_t parameters =
      as_adapter ? export_adapter_of(source, flags, type) : export_whole(source, flags, type, shard_bytes);
  report_export(flags, parameters, as_adapter ? "adapter" : "model", best);
  return 0;
}

void add_json(CLI::App& command, bool& json) {
  command.add_flag("--json", json, "one JSON object on standard output. Default: off");
}

}  // namespace

CommandFunction add_eval_command(CLI::App& program) {
  auto* command = program.add_subcommand("eval", "loss of a model over data, window after window");
  auto flags = std::make_shared<EvalFlags>();
  flags->config.add_to(*command,
                       with_machine_fields({"data", "token-dtype", "document-attention", "seq-len", "micro-batch"}));
  add_source(*command, flags->source);
  add_json(*command, flags->json);
  command->footer("Example: tandem eval --model runs/first --data held-out.txt --json");
  return [flags](const ProgramContext&) { return eval(*flags); };
}

CommandFunction add_digest_command(CLI::App& program) {
  auto* command = program.add_subcommand("digest", "digest of a checkpoint's state");
  auto flags = std::make_shared<DigestFlags>();
  command->add_option("checkpoint", flags->source, "checkpoint or run directory")->required()->type_name("DIR");
  add_json(*command, flags->json);
  command->footer("Example: tandem digest runs/first");
  return [flags](const ProgramContext&) { return digest(*flags); };
}

CommandFunction add_export_command(CLI::App& program) {
  auto* command =
      program.add_subcommand("export", "checkpoint, run or Hugging Face directory to a Hugging Face directory");
  auto flags = std::make_shared<ExportFlags>();
  command->add_option("source", flags->source, "checkpoint, run or Hugging Face directory")
      ->required()
      ->type_name("DIR");
  command->add_option("--to", flags->to, "new folder. Needed. Example: --to exported")->required()->type_name("DIR");
  command
      ->add_option("--model", flags->model,
                   "where the base of SOURCE is now. Default: where it was. Example: --model models/llama")
      ->type_name("DIR");
  command->add_option("--dtype", flags->dtype, "bf16 or fp32. Default: bf16. Example: --dtype fp32")
      ->type_name("TYPE")
      ->check(CLI::IsMember({"bf16", "fp32"}));
  command
      ->add_option("--shard-size", flags->shard_size,
                   "tensors of a file, at most, but one tensor at least. Default: 5GiB. Example: --shard-size 2GiB")
      ->type_name("BYTES");
  command->add_flag("--best", flags->best,
                    "of a run trained with --keep-best: its checkpoint with the lowest loss on --eval-data. Default: "
                    "its newest checkpoint");
  command->add_flag("--merged", flags->merged,
                    "adds adapters to the weights of their base: a whole model, not an adapter for PEFT. Default: off");
  command
      ->add_option(
          "--adapter", flags->adapter,
          "with --merged: adapter that is merged into the model of SOURCE. Default: its own. Example: --adapter "
          "runs/lora")
      ->type_name("DIR");
  add_json(*command, flags->json);
  command->footer("Example: tandem export runs/first --to exported --dtype bf16");
  return [flags](const ProgramContext&) { return export_model(*flags); };
}

}  // namespace tandem
