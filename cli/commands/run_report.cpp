#include "cli/commands/run_report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <map>
#include <utility>

#include "cli/common/html_page.hpp"
#include "core/base/error.hpp"
#include "core/base/json_text.hpp"
#include "core/memory/memory.hpp"
#include "train/config/units.hpp"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

constexpr std::size_t most_points = 1500;  // more than a screen shows apart

std::optional<double> number_in(const Json& json, const char* key) {
  const auto found = json.find(key);
  return found != json.end() && found->is_number() ? std::optional(found->get<double>()) : std::nullopt;
}

std::string text_in(const Json& json, const char* key) {
  const auto found = json.find(key);
  return found != json.end() && found->is_string() ? found->get<std::string>() : std::string();
}

/// The point of a line of metrics.jsonl; empty where it is none, as a line that is being written.
std::optional<RunPoint> point_of(const std::string& line) {
  const Json json = parse_json<Json>(line);
  const auto step = json.is_object() ? number_in(json, "step") : std::nullopt;
  if (!step) return std::nullopt;
  return RunPoint{.step = static_cast<std::int64_t>(*step),
                  .loss = number_in(json, "loss"),
                  .grad_norm = number_in(json, "grad_norm"),
                  .lr = number_in(json, "lr"),
                  .tokens_per_second = number_in(json, "tokens_per_second"),
                  .device_bytes = number_in(json, "device_bytes"),
                  .eval_loss = number_in(json, "eval_loss"),
                  .bound_by = text_in(json, "bound_by")};
}

using Field = std::optional<double> RunPoint::*;

std::optional<double> mean_of(const RunPoint* first, const RunPoint* last, Field field) {
  double sum = 0.0;
  int count = 0;
  for (const RunPoint* point = first; point != last; ++point) {
    if (!(point->*field)) continue;
    sum += *(point->*field);
    ++count;
  }
  return count > 0 ? std::optional(sum / count) : std::nullopt;
}

RunPoint joined(const RunPoint* first, const RunPoint* last) {
  RunPoint all = *(last - 1);
  for (const Field field : {&RunPoint::loss, &RunPoint::grad_norm, &RunPoint::tokens_per_second}) {
    all.*field = mean_of(first, last, field);
  }
  std::map<std::string, int> bounds;
  for (const RunPoint* point = first; point != last; ++point) {
    if (point->device_bytes) all.device_bytes = std::max(all.device_bytes.value_or(0.0), *point->device_bytes);
    if (point->eval_loss) all.eval_loss = point->eval_loss;
    if (++bounds[point->bound_by] > bounds[all.bound_by]) all.bound_by = point->bound_by;
  }
  return all;
}

Json series(const std::vector<RunPoint>& points, Field field) {
  Json values = Json::array();
  for (const RunPoint& point : points) {
    const auto value = point.*field;
    values.push_back(value ? Json(*value) : Json(nullptr));
  }
  return values;
}

/// Share of the steps that each resource bound, the largest first.
Json shares_of_bounds(const std::vector<RunPoint>& points) {
  std::map<std::string, double> counts;
  for (const RunPoint& point : points) {
    if (!point.bound_by.empty()) counts[point.bound_by] += 1.0 / static_cast<double>(points.size());
  }
  std::vector<std::pair<double, std::string>> sorted;
  for (const auto& [name, share] : counts) sorted.emplace_back(share, name);
  std::sort(sorted.rbegin(), sorted.rend());
  Json shares = Json::array();
  for (const auto& [share, name] : sorted) shares.push_back({{"by", name}, {"share", share}});
  return shares;
}

constexpr std::string_view plots = R"html(
const report = JSON.parse(document.getElementById("report").textContent);
const base = {responsive: true, maintainAspectRatio: false, animation: false};
const charts = [];
const points = values => report.steps.map((x, i) => ({x, y: values[i]}));
const level = y => [{x: report.steps[0], y}, {x: report.steps.at(-1), y}];
const line = (label, data, color, more) => ({label, data, borderColor: color, backgroundColor: color, borderWidth: 1.5,
  pointRadius: report.steps.length < 2 ? 3 : 0, ...more});
function draw(id, datasets, y) {
  charts.push(new Chart(document.getElementById(id), {type: "line", data: {datasets}, options: {...base,
    interaction: {mode: "nearest", axis: "x", intersect: false},
    plugins: {legend: {display: datasets.length > 1}},
    scales: {x: {type: "linear", title: {display: true, text: "step"}, min: 0}, y}}}));
}
const titled = text => ({title: {display: true, text}});
const evaluations = points(report.eval_loss).filter(p => p.y !== null);
const losses = [line("training", points(report.loss), "#4477aa")];
if (evaluations.length) losses.push(line("evaluation", evaluations, "#ee6677", {pointRadius: 3}));
draw("loss", losses, titled("loss"));
draw("norm", [line("gradient norm", points(report.grad_norm), "#228833")], {...titled("norm before clipping"), beginAtZero: true});
draw("lr", [line("learning rate", points(report.lr), "#aa3377")], {...titled("learning rate"), beginAtZero: true});
draw("rate", [line("tokens a second", points(report.tokens_per_second), "#4477aa")], {...titled("tokens a second"), beginAtZero: true});
const mib = value => value === null ? null : value / 2 ** 20;
const memory = [line("device, held", points(report.device_bytes.map(mib)), "#4477aa")];
for (const [label, bytes, color] of report.levels) memory.push(line(label, level(mib(bytes)), color, {borderDash: [6, 4]}));
draw("memory", memory, {...titled("MiB"), beginAtZero: true});
charts.push(new Chart(document.getElementById("bound"), {type: "bar", data: {labels: report.bounds.map(b => b.by),
  datasets: [{label: "share of the steps", data: report.bounds.map(b => 100 * b.share), backgroundColor: "#66ccee"}]},
  options: {...base, indexAxis: "y", plugins: {legend: {display: false}}, scales: {x: {...titled("% of the steps"), min: 0, max: 100}}}}));
addEventListener("beforeprint", () => charts.forEach(c => c.resize(Math.min(680, c.width), Math.min(850, c.height))));
addEventListener("afterprint", () => charts.forEach(chart => chart.resize()));
)html";

}  // namespace

std::vector<RunPoint> thinned(const std::vector<RunPoint>& points, std::size_t most) {
  const std::size_t together = (points.size() + most - 1) / most;
  std::vector<RunPoint> result;
  for (std::size_t first = 0; first < points.size(); first += together) {
    result.push_back(joined(points.data() + first, points.data() + std::min(points.size(), first + together)));
  }
  return result;
}

RunReport::RunReport(const fs::path& run) : run_(run), commands_(commands_of(run)) {
  std::ifstream in(run / "metrics.jsonl");
  for (std::string text; std::getline(in, text);) {
    if (auto point = point_of(text)) points_.push_back(std::move(*point));
  }
  if (points_.empty()) {
    throw InputError(
        fmt::format("report {}", run.string()),
        in.is_open() ? "its metrics.jsonl has no step yet" : "it is no run: there is no metrics.jsonl in it",
        "name the --out of a run that has taken a step");
  }
  std::ifstream summary(run / "summary.json");
  summary_ = parse_json<Json>(std::string(std::istreambuf_iterator<char>(summary), {}));
  if (!summary_.is_object()) summary_ = nullptr;
}

const RunPoint* RunReport::best() const noexcept {
  const RunPoint* best = nullptr;
  for (const RunPoint& point : points_) {
    if (point.eval_loss && (best == nullptr || *point.eval_loss < *best->eval_loss)) best = &point;
  }
  return best;
}

/// Rows of the table that the page begins with.
std::vector<std::pair<std::string, std::string>> RunReport::facts() const {
  std::vector<std::pair<std::string, std::string>> rows;
  const auto add_text = [&](const char* name, const char* key) {
    if (const std::string text = text_in(summary_, key); !text.empty()) rows.emplace_back(name, text);
  };
  const bool ended = summary_.is_object();
  if (ended) {
    for (const auto& [name, key] : {std::pair("model", "model"), {"device", "device"}, {"policy", "policy"}})
      add_text(name, key);
  }
  rows.emplace_back("steps", fmt::format("{}{}", steps(), ended ? "" : ", and the run has not ended"));
  if (const RunPoint& last = points_.back(); last.loss) rows.emplace_back("loss", fmt::format("{:.4f}", *last.loss));
  if (best() != nullptr) {
    rows.emplace_back("lowest eval loss", fmt::format("{:.4f}, step {}", *best()->eval_loss, best()->step));
  }
  if (ended) add_measured(rows);
  for (const RunCommand& each : commands_) {
    rows.emplace_back(&each == &commands_.front() ? "command" : fmt::format("resumed after step {}", each.step),
                      each.command);
  }
  return rows;
}

/// Rows of what summary.json has of a run that has ended.
void RunReport::add_measured(std::vector<std::pair<std::string, std::string>>& rows) const {
  const auto add_number = [&](const char* name, const char* key, const auto& shown) {
    if (const auto value = number_in(summary_, key)) rows.emplace_back(name, shown(*value));
  };
  const auto plain = [](double value) { return fmt::format("{:.6g}", value); };
  const auto bytes = [](double value) { return format_bytes(static_cast<std::size_t>(value)); };
  add_number("tokens", "tokens", [](double value) { return format_count(static_cast<std::int64_t>(value)); });
  add_number("tokens a second", "tokens_per_second", plain);
  add_number("seconds a step", "step_seconds", plain);
  add_number("device memory, peak", "peak_device_bytes", bytes);
  add_number("host memory, peak", "peak_host_bytes", bytes);
  add_number("skipped steps", "skipped_steps", plain);
  add_number("steps whose updates ran before the norm, confirmed", "confirmed_steps", plain);
  add_number("steps whose updates ran before the norm, taken back", "rolled_back_steps", plain);
  for (const auto& [name, key] :
       {std::pair("state digest", "state_digest"), {"compute key", "compute_key"}, {"version", "version"}}) {
    if (const std::string text = text_in(summary_, key); !text.empty()) rows.emplace_back(name, text);
  }
}

Json RunReport::data() const {
  const std::vector<RunPoint> shown = thinned(points_, most_points);
  Json data{{"steps", Json::array()}};
  for (const RunPoint& point : shown) data["steps"].push_back(point.step);
  for (const auto& [key, field] : {std::pair("loss", &RunPoint::loss),
                                   {"eval_loss", &RunPoint::eval_loss},
                                   {"grad_norm", &RunPoint::grad_norm},
                                   {"lr", &RunPoint::lr},
                                   {"tokens_per_second", &RunPoint::tokens_per_second},
                                   {"device_bytes", &RunPoint::device_bytes}}) {
    data[key] = series(shown, field);
  }
  data["levels"] = Json::array();
  if (summary_.is_object()) {
    for (const auto& [label, key, colour] : {std::tuple("device, planned", "planned_device_bytes", "#66ccee"),
                                             {"host, planned", "planned_host_bytes", "#ccbb44"},
                                             {"host, peak", "peak_host_bytes", "#ee6677"}}) {
      if (const auto value = number_in(summary_, key)) data["levels"].push_back(Json::array({label, *value, colour}));
    }
  }
  data["bounds"] = shares_of_bounds(points_);
  return data;
}

std::string RunReport::html() const {
  HtmlPage page("tandem report");
  page.add(fmt::format("<h1>{}</h1>\n<table class=\"facts\">\n", escaped(run_.string())));
  for (const auto& [name, value] : facts()) {
    page.add(fmt::format("<tr><td>{}</td><td>{}</td></tr>\n", name, escaped(value)));
  }
  page.add("</table>\n");
  const std::size_t together = (points_.size() + most_points - 1) / most_points;
  if (together > 1) page.add(fmt::format("<p>A point of a plot is the mean of {} steps.</p>\n", together));
  for (const auto& [heading, id] : {std::pair("Loss", "loss"),
                                    {"Gradient norm", "norm"},
                                    {"Learning rate", "lr"},
                                    {"Tokens a second", "rate"},
                                    {"Memory", "memory"},
                                    {"Bound of the step", "bound"}})
    page.add_plot(heading, id);
  return std::move(page).finish(data(), plots);
}

}  // namespace tandem
