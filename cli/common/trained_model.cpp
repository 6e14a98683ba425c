#include "cli/common/trained_model.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <filesystem>
#include <system_error>
#include <utility>

#include "core/numerics/bf16.hpp"
#include "train/hf/model_names.hpp"

namespace tandem {

std::vector<std::string_view> with_machine_fields(std::vector<std::string_view> names) {
  constexpr std::array<std::string_view, 12> fields{
      "model",           "adapter",         "device",  "device-memory", "host-memory",      "link-bandwidth",
      "resident-layers", "prefetch-layers", "compute", "fp8-gradients", "fp8-accumulation", "threads"};
  names.insert(names.end(), fields.begin(), fields.end());
  return names;
}

void require_model(const TrainConfig& config) {
  if (config.model.empty()) throw UsageError("--model", "missing", "for example --model runs/first");
  check_config(config);
}

void add_source(CLI::App& command, std::string& source) {
  command
      .add_option("source", source,
                  "run, checkpoint or adapter, whose base --model says where it is now. Default: --model is the model")
      ->type_name("[SOURCE]");
}

void require_source(std::string_view command, const std::string& source) {
  std::error_code ignored;
  if (source.empty() || std::filesystem::exists(source, ignored) || cached_snapshot(source)) return;
  const std::vector<std::string> near = nearest_folders(source);
  throw UsageError(fmt::format("{} {}", command, source),
                   "not expected, as there is no such run, checkpoint or adapter",
                   near.empty() ? "give each flag one value, and name by this word what is there"
                                : fmt::format("perhaps {}", fmt::join(near, ", ")));
}

ModelSource find_named(std::string_view command, const std::string& source, TrainConfig& config) {
  ModelLookup lookup{.trains = false, .command = command};
  if (!source.empty()) {
    lookup.typed = command;
    lookup.base_at = std::exchange(config.model, source);
  }
  require_model(config);
  config.lora.dropout = 0.0;  // forwards alone have none, whatever an adapter was trained with
  return find_trained_model(config.model, lookup);
}

void load_weights(LoadedModel& model, const ModelSource& source, const RunSetup& setup) {
  const ParameterValues values = initial_values(source, setup.layout, 0);
  model.engine().initialize([&](const Parameter& p, std::int64_t first, std::span<float> to) {
    values(p, first, to);
    for (float& x : to) x = numerics::bf16_to_float(numerics::weight_of_master(x));
  });
  source.close_weights();
}

}  // namespace tandem
