#include "train/loop/reference.hpp"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <optional>
#include <system_error>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/trace.hpp"
#include "data/window_sampler.hpp"
#include "train/config/units.hpp"
#include "train/hf/adapter_source.hpp"
#include "train/hf/hf_export.hpp"
#include "train/hf/lora_modules.hpp"
#include "train/hf/trained_layout.hpp"
#include "train/hf/weights_digest.hpp"
#include "train/report/record_scores.hpp"
#include "train/runtime/stop_signal.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;

/// Data whose records the reference scores.
struct Scored {
  std::string_view flag;
  const TokenSource& source;
  const std::vector<std::string>& names;
  const char* file;  ///< name of the scores in the folder of a run
  std::int64_t records;
};

class Finder {
 public:
  Finder(const PreparedRun& run, RankWorkers& workers, const ReferenceFolders& folders,
         const std::function<void(const std::string&)>& say)
      : run_(run), workers_(workers), folders_(folders), say_(say) {}

  std::optional<std::vector<float>> scores(const Scored& of) {
    if (!folders_.resumed.empty()) return kept(of);
    if (auto found = beside(of)) return keep(of, std::move(*found));
    auto computed = compute(of);
    if (!computed) return std::nullopt;
    return keep(of, {std::move(*computed), weights(), of.source.digest(), run_.setup.computing()});
  }

 private:
  /// Scores that the run has kept since its beginning.
  std::vector<float> kept(const Scored& of) const {
    const fs::path file = folders_.resumed / of.file;
    auto found = read_scores(file);
    if (!found) {
      throw InputError(
          fmt::format("the reference of {}", of.flag), fmt::format("{} is missing", file.string()),
          "put it back, or begin a run with --model CHECKPOINT and another --out, whose reference that is");
    }
    if (!fits(of, *found)) {
      throw InputError(
          fmt::format("the reference of {}", of.flag), fmt::format("{} is of other data", file.string()),
          "go on with the same data; for other data begin a run with --model CHECKPOINT and another --out");
    }
    if (!folders_.out.empty() && folders_.out != folders_.resumed && writes())
      write_scores(folders_.out / of.file, *found);
    return std::move(found->log_probabilities);
  }

  /// Scores beside the data, where they are of these weights and this data.
  std::optional<RecordScores> beside(const Scored& of) {
    if (of.names.size() != 1) return std::nullopt;
    const fs::path file = scores_path(of.names.front());
    auto found = read_scores(file);
    if (!workers_.processes().all("scores beside the data", found.has_value())) return std::nullopt;
    const bool alike = found->computed == run_.setup.computing();
    const bool fitting = fits(of, *found) && alike && found->weights == weights();
    if (workers_.processes().all("scores of these weights and this data", fitting)) {
      say_(fmt::format("reference: log-probabilities of {} records from {}", of.records, file.string()));
      return found;
    }
    const std::string other = !fits(of, *found)         ? "of other data"
                              : alike                   ? "of other weights"
                              : found->computed.empty() ? "of a tandem that did not say how it computed"
                                                        : fmt::format("made with {}, where this run has {}",
                                                                      found->computed, run_.setup.computing());
    spdlog::warn("{}: {}, so the reference is computed anew", file.string(), other);
    return std::nullopt;
  }

  static bool fits(const Scored& of, const RecordScores& scores) {
    return scores.data == of.source.digest() && std::ssize(scores.log_probabilities) == of.records;
  }

  /// Forward passes over all records. Their time is told when some of them have been made.
  std::optional<std::vector<float>> compute(const Scored& of) {
    const double begin = trace_now();
    bool told = false;
    say_(fmt::format("reference: log-probabilities of the {} records of {}", of.records, of.flag));
    return workers_.log_probabilities(of.source, [&](std::int64_t done) {
      const double each = (trace_now() - begin) / static_cast<double>(done);
      if (!std::exchange(told, true) && done < of.records) {
        say_(fmt::format("reference: about {}", format_duration(each * static_cast<double>(of.records))));
      }
      return StopSignal::received() == 0;
    });
  }

  std::vector<float> keep(const Scored& of, RecordScores scores) const {
    if (!folders_.out.empty() && writes()) write_scores(folders_.out / of.file, scores);
    return std::move(scores.log_probabilities);
  }

  bool writes() const { return workers_.processes().is_first(); }

  const std::string& weights() {
    if (weights_.empty()) {
      Parallel& threads = workers_.first().device().host_kernels().parallel();
      const ModelSource& source = run_.source;
      // Adapters that begin now change nothing yet: the reference is the model below them.
      const ModelConfig config = source.adapter ? source.config : without_adapters(source.config);
      weights_ = weights_digest(source, forward_layout(config), run_.config().seed, &threads);
    }
    return weights_;
  }

  const PreparedRun& run_;
  RankWorkers& workers_;
  const ReferenceFolders& folders_;
  const std::function<void(const std::string&)>& say_;
  std::string weights_;
};

}  // namespace

std::optional<Reference> find_reference(const PreparedRun& run, RankWorkers& workers, const ReferenceFolders& folders,
                                        const std::function<void(const std::string&)>& say) {
  Finder finder(run, workers, folders, say);
  const auto records = [&](const TokenSource& source) { return require_windows(source, run.config().seq_len); };
  const TokenSource& data = *run.data.sources.front();
  Reference reference;
  if (!run.setup.shape.reference_in_step) {
    auto scores = finder.scores({"--data", data, run.config().data, reference_file, records(data)});
    if (!scores) return std::nullopt;
    reference.training = std::move(*scores);
  }
  if (!run.eval_data) return reference;
  const TokenSource& held_out = *run.eval_data;
  auto scores =
      finder.scores({"--eval-data", held_out, run.config().eval_data, "reference-eval.safetensors", records(held_out)});
  if (!scores) return std::nullopt;
  reference.evaluation = std::move(*scores);
  return reference;
}

namespace {

/// Adapters of the reference: those that training goes on from, or that a run has kept of them.
std::shared_ptr<const AdapterSource> reference_adapter(const PreparedRun& run, const ReferenceFolders& folders) {
  if (folders.resumed.empty()) return run.source.adapter;
  const auto kept = std::make_shared<const AdapterSource>(folders.resumed / reference_adapter_folder);
  kept->check(run.setup.model_config, run.setup.layout);
  return kept;
}

void keep_adapter(const PreparedRun& run, const AdapterSource& adapter, const fs::path& folder) {
  std::error_code ignored;
  fs::remove_all(folder, ignored);  // a run that ended before its first checkpoint may have left it
  const ModelConfig& model = run.setup.model_config;
  export_adapter(folder, {.config = model,
                          .layout = run.setup.layout,
                          .options = run.config().lora,
                          .base = run.source.base,
                          .type = ExportType::fp32,
                          .beside = {},
                          .values = [&](const Parameter& p, std::int64_t first, std::span<float> values) {
                            adapter.read(model, p, first, values);
                          }});
}

}  // namespace

void take_reference_adapters(const PreparedRun& run, RankWorkers& workers, const ReferenceFolders& folders) {
  if (!run.config().reference_has_adapter) return;
  const auto adapter = reference_adapter(run, folders);
  if (!folders.out.empty() && folders.out != folders.resumed && workers.processes().is_first()) {
    keep_adapter(run, *adapter, folders.out / reference_adapter_folder);
  }
  if (!run.setup.shape.reference_adapters) return;
  workers.run([&](LoadedModel& member, Rank) {
    member.set_reference_adapters(
        [&](const Parameter& p, std::span<float> values) { adapter->read(run.setup.model_config, p, 0, values); });
  });
}

}  // namespace tandem
