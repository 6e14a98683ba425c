#include "cli/common/step_modules.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "scheduler/simulation/simulator.hpp"
#include "train/config/units.hpp"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

/// Purpose of tasks of the engine, and a task that stands for all of it in the cost model.
struct Purpose {
  std::string_view name;
  TaskKind stands_for = TaskKind::layer_use;  ///< layer_use: none does
};

constexpr std::array purposes{Purpose{"gradient path"},
                              Purpose{"norm of the gradient"},
                              Purpose{"update on the CPU", TaskKind::update_cpu},
                              Purpose{"update on the device", TaskKind::update_streamed},
                              Purpose{"copies to the device", TaskKind::load_state},
                              Purpose{"copies to the host", TaskKind::store_state},
                              Purpose{"reads from the file", TaskKind::read_state},
                              Purpose{"writes to the file", TaskKind::write_state},
                              Purpose{"exchanges with peers"}};

/// Index of the purpose of tasks of a lane whose text begins with `word`; none where the model does that work itself.
std::optional<std::size_t> purpose_of(std::string_view lane, std::string_view word) {
  const auto any_of = [](std::string_view one, auto... kinds) { return ((one == name_of(kinds)) || ...); };
  if (lane == name_of(Lane::caller) || lane == name_of(Lane::disk)) return std::nullopt;
  if (any_of(word, TaskKind::norm_gradient, TaskKind::fetch_norm)) return 1;
  if (lane == name_of(Lane::host_to_device)) return 4;
  if (lane == name_of(Lane::device_to_host)) return 5;
  if (lane == name_of(Lane::file_read)) return 6;
  if (lane == name_of(Lane::file_write)) return 7;
  if (lane == name_of(Lane::peers)) return 8;
  if (any_of(word, TaskKind::update_cpu, TaskKind::speculate, TaskKind::retract)) return 2;
  if (any_of(word, TaskKind::update_streamed, TaskKind::update_resident)) return 3;
  if (lane == name_of(Lane::device) || lane == name_of(Lane::cpu)) return 0;
  return std::nullopt;
}

using EngineSums = std::array<EngineFigures, purposes.size()>;

EngineSums sums_of(const std::vector<Trace::Total>& totals, double steps) {
  EngineSums sums{};
  for (const Trace::Total& total : totals) {
    const auto purpose = purpose_of(total.lane, total.word);
    if (!purpose) continue;
    sums[*purpose].seconds += total.seconds / steps;
    sums[*purpose].bytes += static_cast<double>(total.bytes) / steps;
  }
  return sums;
}

/// Parameters that a purpose is of, where it is an update.
std::int64_t parameters_of(const Plan& plan, TaskKind stands_for) {
  const Plan::Shares shares = plan.shares();
  if (stands_for == TaskKind::update_cpu) return shares.cpu;
  return stands_for == TaskKind::update_streamed ? shares.streamed + shares.resident : 0;
}

/// Resource of which the work takes most, and how long that alone would take, at the profile's rates.
void bound(const RunPlan& run, TaskKind stands_for, EngineRow& row) {
  if (stands_for == TaskKind::layer_use || row.seconds() <= 0.0) return;
  Task all{.kind = stands_for};
  all.end = parameters_of(run.plan, stands_for);
  all.bytes = static_cast<std::uint64_t>(row.predicted.bytes);
  const CostModel costs(run.prediction->profile, run.plan.state, run.plan.update_threads);
  TaskCost cost = costs.of(all, false);
  cost.share[static_cast<std::size_t>(Resource::link)] = 0.0;  // the busier way stands for both
  const auto widest = std::ranges::max_element(cost.share);
  row.bound = name_of(static_cast<Resource>(widest - cost.share.begin()));
  row.bound_share = cost.seconds * *widest / row.seconds();
}

std::vector<EngineRow> engine_rows(const RunPlan& run, const std::optional<MeasuredStep>& measured) {
  constexpr std::int64_t pieces = 20'000;  // a second at most
  const RunPrediction& known = *run.prediction;
  Trace spans;
  simulate(run.layout, run.plan, known.profile, known.compute,
           {.micro_batches = run.options.max_micro_batches, .coarse_pieces = pieces, .trace = &spans});
  const EngineSums predicted = sums_of(spans.totals(0.0), 1.0);
  const EngineSums seen = measured ? sums_of(measured->tasks, measured->traced_steps) : EngineSums{};
  std::vector<EngineRow> rows;
  for (std::size_t i = 0; i < purposes.size(); ++i) {
    EngineRow row{.name = std::string(purposes[i].name), .predicted = predicted[i], .measured = {}, .bound = {}};
    if (measured) row.measured = seen[i];
    if (row.predicted.seconds <= 0.0 && row.seconds() <= 0.0) continue;
    bound(run, purposes[i].stands_for, row);
    rows.push_back(std::move(row));
  }
  std::ranges::stable_sort(rows, std::ranges::greater{}, &EngineRow::seconds);
  return rows;
}

void add(PassWork& to, const PassWork& more, double times) {
  to.matmul_flops += times * (more.matmul_flops + more.fp8_flops);
  to.attention_flops += times * more.attention_flops;
  to.memory_bytes += times * more.memory_bytes;
  to.kernels += times * more.kernels;
}

std::vector<ModuleRow> module_rows(const RunPlan& run, const SequenceFacts& sequences,
                                   const std::optional<MeasuredStep>& measured) {
  const auto micro_batches = static_cast<double>(run.options.max_micro_batches);
  std::array<ModuleRow, module_kinds> all{};
  for (const LayerModules& layer : module_work_of(run.model_config, run.shape, sequences, &run.layout)) {
    for (std::size_t kind = 0; kind < module_kinds; ++kind) {
      add(all[kind].forward, layer[kind].forward, micro_batches);
      add(all[kind].backward, layer[kind].backward, micro_batches);
    }
  }
  std::vector<ModuleRow> rows;
  for (std::size_t kind = 0; kind < module_kinds; ++kind) {
    ModuleRow& row = all[kind];
    row.kind = static_cast<ModuleKind>(kind);
    row.forward_bounds = bound_seconds(run.prediction->profile, row.forward);
    row.backward_bounds = bound_seconds(run.prediction->profile, row.backward);
    // Decoding is the engine's, in the stream's wait for weights.
    if (measured && row.kind != ModuleKind::decoding) row.measured = measured->parts[kind];
    if (row.predicted_seconds() > 0.0 || row.seconds() > 0.0) rows.push_back(row);
  }
  std::ranges::stable_sort(rows, std::ranges::greater{}, &ModuleRow::seconds);
  return rows;
}

BoundSeconds both(const ModuleRow& row) {
  BoundSeconds sum = row.forward_bounds;
  for (std::size_t i = 0; i < sum.seconds.size(); ++i) sum.seconds[i] += row.backward_bounds.seconds[i];
  return sum;
}

Json json_of(const ModuleRow& row) {
  Json json{{"module", name_of(row.kind)}};
  json["predicted"] = {{"seconds", row.predicted_seconds()},
                       {"forward_seconds", row.forward_bounds.total()},
                       {"backward_seconds", row.backward_bounds.total()},
                       {"matmul_flops", row.forward.matmul_flops + row.backward.matmul_flops},
                       {"attention_flops", row.forward.attention_flops + row.backward.attention_flops},
                       {"memory_bytes", row.forward.memory_bytes + row.backward.memory_bytes},
                       {"kernels", row.forward.kernels + row.backward.kernels}};
  json["measured"] = nullptr;
  if (row.measured) {
    const PartFigures& m = *row.measured;
    json["measured"] = {{"seconds", m.seconds()},
                        {"forward_seconds", m.forward_seconds},
                        {"backward_seconds", m.backward_seconds},
                        {"matmul_flops", m.matmul_flops},
                        {"attention_flops", m.attention_flops},
                        {"calls", m.calls}};
  }
  json["bound_by"] = name_of(row.bound());
  json["bound_share"] = row.bound_share();
  return json;
}

Json json_of(const EngineRow& row) {
  const auto figures = [](const EngineFigures& f) { return Json{{"seconds", f.seconds}, {"bytes", f.bytes}}; };
  return {{"work", row.name},
          {"predicted", figures(row.predicted)},
          {"measured", row.measured ? figures(*row.measured) : Json(nullptr)},
          {"bound_by", row.bound.empty() ? Json(nullptr) : Json(row.bound)},
          {"bound_share", row.bound.empty() ? Json(nullptr) : Json(row.bound_share)}};
}

std::string cell(bool known, double value, int digits = 4) {
  return known ? fmt::format("{:.{}f}", value, digits) : std::string("-");
}

/// A row of the table; its last cells may be empty.
template <class... Cells>
std::string line(const Cells&... cells) {
  std::string text = fmt::format("{:<26}{:>13}{:>13}{:>8}{:>10}{:>11}  {}", cells...);
  text.erase(text.find_last_not_of(' ') + 1);
  return text + '\n';
}

/// `all`: sum of the modules; 0 for one that is not among them.
std::string text_of(const ModuleRow& row, double all) {
  const double tera = 1e-12, giga = 1e-9;
  const double flops =
      row.forward.matmul_flops + row.backward.matmul_flops + row.forward.attention_flops + row.backward.attention_flops;
  return line(name_of(row.kind), cell(true, row.predicted_seconds()), cell(row.measured.has_value(), row.seconds()),
              all > 0.0 ? fmt::format("{:.1f}%", 100.0 * row.seconds() / all) : std::string(),
              fmt::format("{:.4g}", tera * flops),
              fmt::format("{:.4g}", giga * (row.forward.memory_bytes + row.backward.memory_bytes)),
              fmt::format("{}, {:.0f}% of it reached", name_of(row.bound()), 100.0 * row.bound_share()));
}

std::string text_of(const EngineRow& row) {
  const std::string by =
      row.bound.empty() ? std::string() : fmt::format("{}, {:.0f}% of it reached", row.bound, 100.0 * row.bound_share);
  const double bytes = row.measured ? row.measured->bytes : row.predicted.bytes;
  return line(row.name, cell(true, row.predicted.seconds), cell(row.measured.has_value(), row.seconds()), "", "",
              bytes > 0.0 ? fmt::format("{:.4g}", 1e-9 * bytes) : std::string(), by);
}

/// A part of the stream's time, or a sum, that is no module.
std::string text_of(std::string_view name, std::optional<double> predicted, std::optional<double> measured,
                    std::string_view note = {}) {
  return line(name, cell(predicted.has_value(), predicted.value_or(0.0)),
              cell(measured.has_value(), measured.value_or(0.0)), "", "", "", note);
}

}  // namespace

WorkBound ModuleRow::bound() const noexcept { return both(*this).widest(); }

double ModuleRow::bound_share() const noexcept {
  const double all = seconds();
  return all > 0.0 ? both(*this).widest_seconds() / all : 0.0;
}

double StepModules::predicted_seconds() const noexcept {
  double sum = 0.0;
  for (const ModuleRow& row : modules) sum += row.predicted_seconds();
  return sum;
}

double StepModules::measured_seconds() const noexcept {
  double sum = 0.0;
  for (const ModuleRow& row : modules) sum += row.measured ? row.measured->seconds() : 0.0;
  return sum;
}

StepModules step_modules(const RunPlan& run, const SequenceFacts& sequences, std::optional<MeasuredStep> measured) {
  StepModules step;
  step.modules = module_rows(run, sequences, measured);
  step.engine = engine_rows(run, measured);
  step.predicted_step_seconds = run.prediction->choice.simulation.step_seconds;
  step.measured = std::move(measured);
  return step;
}

Json json_of(const StepModules& step) {
  Json json{
      {"predicted", {{"step_seconds", step.predicted_step_seconds}, {"modules_seconds", step.predicted_seconds()}}},
      {"measured", nullptr},
      {"modules", Json::array()},
      {"engine", Json::array()}};
  if (step.measured) {
    const MeasuredStep& m = *step.measured;
    json["measured"] = {{"steps", m.steps},
                        {"step_seconds", m.step_seconds},
                        {"compute_seconds", m.compute_seconds},
                        {"watched_step_seconds", m.watched_seconds},
                        {"modules_seconds", step.measured_seconds()},
                        {"waiting_for_weights_seconds", m.parts[weights_part].seconds()},
                        {"waiting_for_gradient_buffers_seconds", m.parts[gradients_part].seconds()},
                        {"other_seconds", m.parts[other_part].seconds()},
                        {"modules_over_step", step.modules_over_step()}};
  }
  for (const ModuleRow& row : step.modules) json["modules"].push_back(json_of(row));
  for (const EngineRow& row : step.engine) json["engine"].push_back(json_of(row));
  return json;
}

std::string table_of(const StepModules& step) {
  const std::optional<MeasuredStep>& m = step.measured;
  const double all = m ? step.measured_seconds() : step.predicted_seconds();
  const auto part = [&](StreamPart index) {
    return m ? std::optional(m->parts[index].seconds()) : std::optional<double>();
  };
  const auto seconds = [&](double MeasuredStep::*member) {
    return m ? std::optional((*m).*member) : std::optional<double>();
  };
  std::string text = line("module", "predicted, s", "measured, s", "share", "TFLOP", "GB moved", "bound by");
  for (const ModuleRow& row : step.modules) text += text_of(row, !m || row.measured ? all : 0.0);
  text += text_of("modules together", step.predicted_seconds(), m ? std::optional(all) : std::optional<double>());
  if (m) {
    text += text_of("waiting for weights", {}, part(weights_part), "and decoding them");
    text += text_of("waiting for gradients", {}, part(gradients_part), "buffers that are free, and zero");
    text += text_of("other", {}, part(other_part), "batches, losses, the end of the step");
    text += text_of("step, watched", {}, seconds(&MeasuredStep::watched_seconds), "all of the above");
    text += text_of("watching", {}, m->watched_seconds - m->step_seconds, "the watched step less the other");
  }
  text += text_of("step", step.predicted_step_seconds, seconds(&MeasuredStep::step_seconds));
  text += "beside the modules, or while they wait\n";
  for (const EngineRow& row : step.engine) text += text_of(row);
  return text;
}

}  // namespace tandem
