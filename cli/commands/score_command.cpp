// tandem score: log-probabilities of records under a model.
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <vector>

#include "cli/common/commands.hpp"
#include "cli/common/flags.hpp"
#include "cli/common/trained_model.hpp"
#include "core/base/error.hpp"
#include "core/base/json_text.hpp"
#include "data/window_sampler.hpp"
#include "io/atomic_file.hpp"
#include "train/hf/model_source.hpp"
#include "train/hf/trained_layout.hpp"
#include "train/hf/weights_digest.hpp"
#include "train/report/record_scores.hpp"
#include "train/runtime/rank_workers.hpp"
#include "train/setup/training_data.hpp"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

struct ScoreFlags {
  ConfigFlags config;
  std::string model;
  std::string out;
  bool text = false;
  bool json = false;
};

/// The file to write: as given, else beside the token file.
fs::path output_of(const ScoreFlags& flags, const TrainConfig& config) {
  if (!flags.out.empty()) return flags.out;
  const fs::path name = config.data.front();
  if (config.data.size() == 1 && name.extension() == ".bin") return scores_path(name);
  throw UsageError("--out", "missing, as --data is not one .bin, beside which the scores would lie",
                   "for example --out scores.safetensors");
}

/// Throws WriteError where a file is there that would be lost: scores alone are written over.
void require_scores_or_nothing(const fs::path& file) {
  try {
    static_cast<void>(read_scores(file));
  } catch (const InputError&) {
    throw WriteError(fmt::format("cannot write {}", file.string()), "it is there, and no file of scores",
                     "name another file by --out");
  }
}

std::unique_ptr<TokenSource> open_records(const TrainConfig& config, const ModelSource& source) {
  auto data = open_tokens(config.data, config, source, "--data", DataUse::scores);
  if (data->layout() == TokenLayout::rows) return data;
  throw InputError("--data", "its records have no rows of their own, and each is to have a score",
                   "prepare it with --layout rows");
}

/// Number of targets of each record.
std::vector<std::int64_t> target_counts(const TokenSource& data, std::int64_t length, std::size_t records) {
  std::vector<std::int64_t> counts(records);
  std::vector<std::int32_t> inputs(static_cast<std::size_t>(length)), targets(inputs.size());
  for (std::size_t i = 0; i < records; ++i) {
    counts[i] = read_window(data, static_cast<std::int64_t>(i), {inputs, targets});
  }
  return counts;
}

std::string lines_of(const std::vector<float>& scores, const std::vector<std::int64_t>& targets) {
  std::string text = "record targets log_probability\n";
  for (std::size_t i = 0; i < scores.size(); ++i) text += fmt::format("{} {} {}\n", i, targets[i], scores[i]);
  return text;
}

int score(const ScoreFlags& flags) {
  TrainConfig config = flags.config.config();
  if (config.data.empty()) throw UsageError("--data", "missing", "for example --data pairs.bin");
  const fs::path out = output_of(flags, config);
  require_scores_or_nothing(out);
  ModelSource source = find_named("score", flags.model, config);
  take_adapters(config, source);
  static_cast<void>(sequence_length(config, source.config));  // refuses one beyond the positions
  check_weights(source, forward_layout(source.config));
  const auto data = open_records(config, source);
  take_sequences(config, source.config, *data, "--data");
  require_writable(out);
  RunSetup setup = set_up_run(config, source.config, {.training = false, .saves = false});
  RankWorkers workers(setup, nullptr);
  load_weights(workers.first(), source, setup);
  const RecordScores scores{.log_probabilities = workers.log_probabilities(*data).value(),
                            .weights = weights_digest(source, setup.layout, 0),
                            .data = data->digest(),
                            .computed = setup.computing()};
  write_scores(out, scores);
  const std::vector<float>& values = scores.log_probabilities;
  const std::vector<std::int64_t> targets = target_counts(*data, config.seq_len, values.size());
  const auto tokens = std::accumulate(targets.begin(), targets.end(), std::int64_t{0});
  const double sum = std::accumulate(values.begin(), values.end(), 0.0);
  if (flags.json) {
    print_output(json_document(
        Json{{"records", values.size()}, {"tokens", tokens}, {"log_probability", sum}, {"out", out.string()}}));
  } else if (flags.text) {
    print_output(lines_of(values, targets));
  } else {
    print_output(fmt::format("{} records, {} targets, {:.6f} nats a target, in {}\n", values.size(), tokens,
                             -sum / static_cast<double>(tokens), out.string()));
  }
  return 0;
}

}  // namespace

CommandFunction add_score_command(CLI::App& program) {
  auto* command = program.add_subcommand("score", "log-probabilities of the records of a token file under a model");
  auto flags = std::make_shared<ScoreFlags>();
  command->add_option("model", flags->model, "Hugging Face directory, checkpoint or run directory")
      ->required()
      ->type_name("MODEL");
  flags->config.add_to(*command, with_machine_fields({"data", "token-dtype", "seq-len", "micro-batch"}));
  command->get_option("--model")->description(
      "where the base of MODEL is now. Default: where it was. Example: --model models/llama");
  command
      ->add_option(
          "--out", flags->out,
          "file to write. Default: NAME.scores.safetensors beside NAME.bin, where train --objective dpo takes it "
          "for its reference. Example: --out scores.safetensors")
      ->type_name("FILE");
  command->add_flag("--text", flags->text, "a line for each record on standard output. Default: off");
  command->add_flag("--json", flags->json, "one JSON object on standard output. Default: off");
  command->footer("Example: tandem score runs/first --data pairs.bin");
  return [flags](const ProgramContext&) { return score(*flags); };
}

}  // namespace tandem
