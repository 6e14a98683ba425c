#include "train/loop/summary.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "core/base/json_text.hpp"
#include "core/base/version.hpp"
#include "train/hf/lora_modules.hpp"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

Json number(std::optional<double> value) { return value && std::isfinite(*value) ? Json(*value) : Json(nullptr); }

Json lora_of(const RunSetup& setup) {
  const auto& lora = setup.model_config.lora;
  if (!lora) return nullptr;
  std::vector<std::string> targets = target_names(setup.model_config, *lora);
  std::ranges::copy(target_parameters(setup.model_config, *lora), std::back_inserter(targets));
  return {{"rank", lora->rank}, {"alpha", lora->alpha}, {"targets", targets}};
}

/// Adds what DPO has beside other objectives.
void add_pairs(Json& json, const RunRecord& record) {
  json["objective"] = "dpo";
  const auto add = [&](const std::string& prefix, const std::optional<PairMetrics>& pairs) {
    json[prefix + "reward_margin"] = pairs ? number(pairs->margin) : Json(nullptr);
    json[prefix + "reward_accuracy"] = pairs ? number(pairs->accuracy) : Json(nullptr);
  };
  add("", record.last_pairs);
  add("eval_", record.eval_pairs);
}

std::string_view name_of(EndReason reason) {
  switch (reason) {
    case EndReason::steps:
      return "steps";
    case EndReason::patience:
      return "patience";
    case EndReason::signal:
      break;
  }
  return "signal";
}

}  // namespace

std::string summary_of_earlier_steps(const std::string& summary, const RunRecord& record, const std::string& digest,
                                     EndReason reason) {
  Json json = parse_json<Json>(summary);
  if (!json.is_object() || !json.contains("state_digest") || json["state_digest"] != digest) return {};
  if (record.evaluated()) json["eval_loss"] = number(record.eval_loss);
  if (record.evaluated() && record.eval_pairs) {
    json["eval_reward_margin"] = number(record.eval_pairs->margin);
    json["eval_reward_accuracy"] = number(record.eval_pairs->accuracy);
  }
  json["ended_by"] = name_of(reason);
  return json_document(json);
}

std::string summary_json(const PreparedRun& run, const StepSummary& steps, const RankTotals& totals,
                         const std::string& digest, EndReason reason) {
  const RunSetup& setup = run.setup;
  const RunRecord& record = run.record;
  const EngineCounters& counters = totals.counters;
  Json json{{"model", setup.model_config.name},
            {"parameters", setup.layout.parameter_count()},
            {"lora", lora_of(setup)},
            {"base_format", base_name(setup.base_format())},
            {"device", setup.device_names()},
            {"ranks", setup.ranks()},
            {"processes", run.processes->rank().count},
            {"policy", setup.plan.policy.text()},
            {"micro_batches",
             {{"count", run.config().grad_accum},
              {"at_once", setup.plan.micro_batches_at_once},
              {"order", setup.order.empty() ? Json(nullptr) : Json(setup.order)}}},
            {"steps", record.step},
            {"ended_by", name_of(reason)},
            {"tokens", record.tokens},
            {"first_loss", number(record.first_loss)},
            {"final_loss", number(record.last_loss)},
            {"eval_loss", number(record.eval_loss)},
            {"tokens_per_second", number(steps.tokens_per_second)},
            {"step_seconds", number(steps.step)},
            {"phase_seconds",
             {{"forward", number(steps.forward)},
              {"backward", number(steps.backward)},
              {"update", number(steps.update)},
              {"exposed_update", number(steps.exposed_update)}}},
            {"planned_device_bytes", setup.planned_device_bytes()},
            {"peak_device_bytes", totals.peak_device_bytes},
            {"planned_host_bytes", setup.planned_host_bytes()},
            {"peak_host_bytes", totals.peak_host_bytes},
            {"planned_file_bytes", setup.all_memory().bytes_in(Place::file)},
            {"updated_parameters",
             {{"cpu", counters.parameters_updated_cpu},
              {"gpu_streamed", counters.parameters_updated_streamed},
              {"gpu_resident", counters.parameters_updated_resident}}},
            {"bytes",
             {{"h2d", counters.bytes_host_to_device},
              {"d2h", counters.bytes_device_to_host},
              {"peers", counters.bytes_from_peers},
              {"file_read", counters.bytes_from_file},
              {"file_write", counters.bytes_to_file},
              {"activations_h2d", totals.inputs.to_device},
              {"activations_d2h", totals.inputs.to_host}}},
            {"speculated_parameters", counters.parameters_speculated},
            {"confirmed_steps", counters.confirmed_steps},
            {"rolled_back_steps", counters.rolled_back_steps},
            {"skipped_steps", record.skipped},
            {"resumed_from_step", record.resumed_from ? Json(*record.resumed_from) : Json(nullptr)},
            {"state_digest", digest},
            {"compute_key", setup.compute_key()},
            {"version", version},
            {"command", run.request.command}};
  if (run.config().objective == Objective::dpo) add_pairs(json, record);
  if (run.setup.reference) json["dpo_reference"] = run.setup.reference->in_step ? "step" : "before";
  return json_document(json);
}

}  // namespace tandem
