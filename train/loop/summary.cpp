// summary.json of a finished run.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

#include "core/base/json_text.hpp"
#include "core/base/median.hpp"
#include "core/base/version.hpp"
#include "core/host/topology.hpp"
#include "train/loop/trainer.hpp"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

Json number(std::optional<double> value) { return value && std::isfinite(*value) ? Json(*value) : Json(nullptr); }

std::optional<double> median_of(const std::vector<double>& values) {
  return values.empty() ? std::nullopt : std::optional(median(values));
}

std::optional<double> mean(const std::vector<double>& values) {
  if (values.empty()) return std::nullopt;
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

}  // namespace

/// What the run that took the steps to this state has said; empty where it has not come to that. A run that takes none
/// has measured nothing, and has at most validated anew.
std::string Trainer::summary_of_the_steps(const std::string& digest) const {
  Json json = parse_json<Json>(directory_->summary());
  if (!json.is_object() || !json.contains("state_digest") || json["state_digest"] != digest) return {};
  if (evaluated_step_ == step_) json["eval_loss"] = number(eval_loss_);
  return json_document(json);
}

std::string Trainer::summary(const std::string& digest) {
  const EngineCounters counters = workers_->counters();
  InputTraffic inputs = setup_.model->input_traffic();
  for (const RunSetup& peer : setup_.peers) {
    inputs.to_device += peer.model->input_traffic().to_device;
    inputs.to_host += peer.model->input_traffic().to_host;
  }
  const std::size_t peak_device = setup_.peak_device_bytes();
  // The host device's memory is this process's own, but stands for memory elsewhere.
  std::size_t emulated = 0;
  const auto add_emulated = [&](const Device& device) {
    if (device.info().kind == "host") emulated += device.peak_bytes();
  };
  add_emulated(*setup_.device);
  for (const RunSetup& peer : setup_.peers) add_emulated(*peer.device);
  const std::size_t peak_process = sample_process_memory().peak_anonymous;
  const auto step_seconds = median_of(times_.step);
  const Json json{{"model", setup_.model_config.name},
                  {"parameters", setup_.layout.parameter_count()},
                  {"device", setup_.device_names()},
                  {"ranks", setup_.ranks()},
                  {"policy", setup_.plan.policy.text()},
                  {"micro_batches",
                   {{"count", config_.grad_accum},
                    {"at_once", setup_.plan.micro_batches_at_once},
                    {"order", setup_.order.empty() ? Json(nullptr) : Json(setup_.order)}}},
                  {"steps", step_},
                  {"tokens", tokens_},
                  {"first_loss", number(first_loss_)},
                  {"final_loss", number(last_loss_)},
                  {"eval_loss", number(eval_loss_)},
                  {"tokens_per_second", number(median_of(times_.rate))},
                  {"step_seconds", number(step_seconds)},
                  {"phase_seconds",
                   {{"forward", number(median_of(times_.forward))},
                    {"backward", number(median_of(times_.backward))},
                    {"update", number(mean(times_.update))},
                    {"exposed_update", number(median_of(times_.exposed))}}},
                  {"planned_device_bytes", setup_.planned_device_bytes()},
                  {"peak_device_bytes", peak_device},
                  {"planned_host_bytes", setup_.planned_host_bytes()},
                  {"peak_host_bytes", peak_process > emulated ? peak_process - emulated : 0},
                  {"planned_file_bytes", setup_.all_memory().bytes_in(Place::file)},
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
                    {"activations_h2d", inputs.to_device},
                    {"activations_d2h", inputs.to_host}}},
                  {"skipped_steps", skipped_},
                  {"resumed_from_step", resumed_from_ ? Json(*resumed_from_) : Json(nullptr)},
                  {"state_digest", digest},
                  {"compute_key", setup_.compute_key()},
                  {"version", version},
                  {"command", request_.command}};
  return json_document(json);
}

}  // namespace tandem
