#include "cli/common/trained_model.hpp"

#include <array>

#include "core/numerics/bf16.hpp"

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

void load_weights(LoadedModel& model, const ModelSource& source, const RunSetup& setup) {
  const ParameterValues values = initial_values(source, setup.layout, 0);
  model.engine().initialize([&](const Parameter& p, std::int64_t first, std::span<float> to) {
    values(p, first, to);
    for (float& x : to) x = numerics::bf16_to_float(numerics::weight_of_master(x));
  });
  source.close_weights();
}

}  // namespace tandem
