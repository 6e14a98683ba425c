#include "cli/bench/bench_report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

#include "cli/common/html_page.hpp"
#include "core/base/error.hpp"
#include "core/base/json_text.hpp"
#include "core/base/version.hpp"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

struct Span {
  std::string name;
  double begin = 0.0;  ///< seconds
  double end = 0.0;
  bool mixed = false;  ///< it stands for spans of other kinds, too

  double seconds() const noexcept { return end - begin; }
  /// Kind of the work, without its object.
  std::string kind() const { return name.substr(0, name.find(' ')); }
};

struct Lane {
  std::string name;
  std::vector<Span> spans;
};

/// Empty where it is no trace.
std::vector<Lane> lanes_of(const std::filesystem::path& trace) {
  constexpr double microseconds = 1e6;
  std::vector<Lane> lanes;
  std::ifstream in(trace);
  const Json root = parse_json<Json>(std::string(std::istreambuf_iterator<char>(in), {}));
  if (!root.is_object()) return lanes;
  for (const Json& event : root.at("traceEvents")) {
    const auto tid = event.value("tid", std::size_t{0});
    if (event.value("ph", "") == "M" && event.value("name", "") == "thread_name") {
      if (lanes.size() <= tid) lanes.resize(tid + 1);
      lanes[tid].name = event.at("args").value("name", "");
    }
  }
  for (const Json& event : root.at("traceEvents")) {
    const auto tid = event.value("tid", std::size_t{0});
    if (event.value("ph", "") != "X" || tid >= lanes.size()) continue;
    const double begin = event.value("ts", 0.0) / microseconds;
    lanes[tid].spans.push_back({event.value("name", ""), begin, begin + event.value("dur", 0.0) / microseconds});
  }
  for (Lane& lane : lanes) std::ranges::stable_sort(lane.spans, {}, &Span::begin);
  return lanes;
}

/// Neighbours less than a hair apart as one span: those of one kind, and of any kind where both are shorter than a
/// hair. So no more are left than two to each hair of the step.
std::vector<Span> joined(const std::vector<Span>& spans, double hair) {
  std::vector<Span> result;
  for (const Span& span : spans) {
    Span* const last = result.empty() ? nullptr : &result.back();
    const bool near = last != nullptr && span.begin - last->end <= hair;
    const bool alike = near && last->kind() == span.kind();
    if (alike || (near && std::max(last->seconds(), span.seconds()) < hair)) {
      last->name = last->kind();
      last->mixed = last->mixed || !alike;
      last->end = std::max(last->end, span.end);
    } else {
      result.push_back(span);
    }
  }
  return result;
}

/// The whole step as [lane, name, begin, end] in seconds. Of lanes that have very many spans those that no screen shows
/// apart are joined.
Json timeline_of(const std::filesystem::path& trace) {
  constexpr std::size_t many = 1000;
  constexpr double hairs = 1000.0;  // pixels that the plot is wide, about
  std::vector<Lane> lanes = lanes_of(trace);
  double end = 0.0;
  for (const Lane& lane : lanes) {
    for (const Span& span : lane.spans) end = std::max(end, span.end);
  }
  Json timeline = Json::array();
  for (Lane& lane : lanes) {
    if (lane.spans.size() > many) lane.spans = joined(lane.spans, end / hairs);
    for (const Span& span : lane.spans) {
      timeline.push_back({lane.name, span.mixed ? span.name + " and others" : span.name, span.begin, span.end});
    }
  }
  return timeline;
}

std::string error_of(const BenchRow& row) {
  if (!row.measured) return "-";
  return fmt::format("{:+.0f}%", 100.0 * (row.predicted.step_seconds / row.measured->step_seconds - 1.0));
}

std::string measured_of(const BenchRow& row) {
  return row.measured ? fmt::format("{:.4f}", row.measured->step_seconds) : "-";
}

/// Spread of the measured steps as text.
std::string spread_of(const BenchRow& row) {
  return row.measured ? fmt::format("{:.0f}%", 100.0 * row.measured->spread) : "-";
}

std::string link_bytes_of(const BenchRow& row) {
  return fmt::format("{} / {}", format_bytes(row.h2d_bytes), format_bytes(row.d2h_bytes));
}

/// All rows must end with one; empty where nothing was measured.
std::string digest_of(const std::vector<BenchRow>& rows) {
  const auto measured = std::ranges::find_if(rows, [](const BenchRow& row) { return !row.state_digest.empty(); });
  return measured == rows.end() ? std::string() : measured->state_digest;
}

std::string table_rows(const BenchReport& report) {
  std::string rows;
  for (const BenchRow& row : report.rows) {
    const std::string setting =
        row.setting.empty() ? "" : fmt::format("<br><small>{}</small>", escaped(text_of(row.setting)));
    rows += fmt::format("<tr><td>{}{}</td>", escaped(row.policy), setting);
    if (row.fits()) {
      rows += fmt::format(
          "<td>{:.4f}</td><td>{}</td><td>{}</td><td>{}</td><td>{:.0f}</td><td>{}</td><td>{}</td><td>{}</td></tr>\n",
          row.predicted.step_seconds, measured_of(row), spread_of(row), error_of(row),
          report.tokens / row.step_seconds(), row.predicted.bound_by, link_bytes_of(row),
          format_bytes(row.planned_device_bytes));
    } else {
      rows += fmt::format("<td colspan=\"8\">{}</td></tr>\n", escaped(row.refusal));
    }
  }
  return rows;
}

constexpr std::string_view plots = R"html(
const report = JSON.parse(document.getElementById("report").textContent);
const fit = report.policies.filter(p => p.fits);
const text = setting => Object.values(setting || {}).join(" ");
const name = p => p.setting ? p.policy + ", " + text(p.setting) : p.policy;
const names = fit.flatMap(p => p.measured ? [name(p) + ", measured", "predicted"] : [name(p) + ", predicted"]);
const steps = fit.flatMap(p => p.measured ? [p.measured, p.predicted] : [p.predicted]);
const exposed = s => Math.min(s.exposed_update_seconds, s.forward_seconds);
const is_drawn = (item, data) => data.datasets[item.datasetIndex].data.some(v => v !== null && v !== 0);
const legend = {labels: {filter: is_drawn}};
const base = {responsive: true, maintainAspectRatio: false, animation: false, plugins: {legend}};
const axis = text => ({title: {display: true, text}, beginAtZero: true});
const colors = ["#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#222222"];
const charts = [];
// Long names would leave no room for bars on a phone: lines of at most so many characters.
const most = window.innerWidth < 600 ? 18 : 40;
function lines(text) {
  const found = [""];
  for (const word of text.split(" ")) {
    if ((found.at(-1) + word).length > most && found.at(-1)) found.push("");
    found[found.length - 1] += (found.at(-1) ? " " : "") + word;
  }
  return found;
}
const whole = {autoSkip: false, callback: function (value) { return lines(this.getLabelForValue(value)); }};
function draw(id, labels, config) {
  const canvas = document.getElementById(id);
  const row = Math.max(...labels.map(label => lines(label).length)) > 1 ? 2 : 1.4;
  if (labels.length) canvas.parentElement.style.height = Math.max(14, 6 + row * labels.length) + "rem";
  charts.push(new Chart(canvas, config));
}
draw("steps", names, {type: "bar", data: {labels: names, datasets: [
  {label: "forward", data: steps.map(s => s.forward_seconds - exposed(s)), backgroundColor: "#4477aa"},
  {label: "backward", data: steps.map(s => s.backward_seconds), backgroundColor: "#66ccee"},
  {label: "waiting for updates", data: steps.map(exposed), backgroundColor: "#ee6677"},
  {label: "rest", data: steps.map(s => Math.max(0, s.step_seconds - s.forward_seconds - s.backward_seconds)), backgroundColor: "#bbbbbb"}]},
  options: {...base, indexAxis: "y", scales: {x: {...axis("seconds a step"), stacked: true},
    y: {stacked: true, ticks: whole}}}});
const settings = [...new Set(report.policies.map(p => text(p.setting)))];
const policies = [...new Set(report.policies.map(p => p.policy))];
const step = p => p && p.fits ? (p.measured || p.predicted).step_seconds : null;
if (document.getElementById("sweep")) draw("sweep", [], {type: "line", data: {labels: settings, datasets: policies.map((policy, i) => ({
  label: policy, borderColor: colors[i % colors.length], backgroundColor: colors[i % colors.length],
  data: settings.map(s => step(report.policies.find(p => p.policy === policy && text(p.setting) === s)))}))},
  options: {...base, scales: {x: {ticks: {autoSkip: false}}, y: axis("seconds a step")}}});
const rate = s => report.parameters / s.update_seconds / 1e9;
const updates = key => fit.filter(p => p[key] && p[key].update_seconds > 0).map(p => ({x: p.plan.cpu_share, y: rate(p[key]), name: name(p)}));
// The name of each policy beside its points; a phone has no room for them.
const named = {id: "named", afterDatasetsDraw(chart) {
  if (chart.width < 500) return;
  const {ctx, chartArea} = chart;
  ctx.save();
  ctx.font = "12px system-ui, sans-serif";
  ctx.fillStyle = "#222222";
  chart.data.datasets.forEach((set, i) => set.label === (fit.some(p => p.measured) ? "measured" : "predicted") &&
    chart.getDatasetMeta(i).data.forEach((point, j) => {
      const text = set.data[j].name, width = ctx.measureText(text).width, right = point.x + 9 + width > chartArea.right;
      ctx.fillText(text, right ? point.x - 9 - width : point.x + 9, point.y + 4);
    }));
  ctx.restore();
}};
const machines = [...new Set(report.bound.map(b => b.machine || ""))];
draw("updates", [], {type: "scatter", plugins: [named], data: {datasets: [
  ...machines.map((machine, i) => ({label: machine ? "bound, " + machine : "bound, nothing resident", showLine: true, pointRadius: 0,
    borderDash: [[], [8, 4], [2, 3], [8, 4, 2, 4]][i % 4], borderColor: ["#222222", "#888888", "#bb5500", "#5500bb"][i % 4], pointStyle: "line",
    data: report.bound.filter(b => (b.machine || "") === machine).map(b => ({x: b.cpu_share, y: b.parameters_per_second / 1e9}))})),
  {label: "measured", data: updates("measured"), backgroundColor: "#ee6677", pointRadius: 6, clip: false},
  {label: "predicted", data: updates("predicted"), backgroundColor: "#4477aa", pointStyle: "triangle", pointRadius: 6, clip: false}]},
  options: {...base, scales: {x: {...axis("share updated on the CPU"), max: 1}, y: {type: "logarithmic", title: {display: true, text: "1e9 parameters a second"}}},
    plugins: {legend: {labels: {usePointStyle: true, filter: is_drawn}}, tooltip: {callbacks: {label: c => (c.raw.name || "") + " " + c.raw.y.toFixed(3)}}}}});
draw("memory", fit.flatMap(p => [name(p), ""]), {type: "bar", data: {labels: fit.map(name), datasets: [
  {label: "device", data: fit.map(p => p.planned_device_bytes / 2 ** 20), backgroundColor: "#4477aa"},
  {label: "host", data: fit.map(p => p.planned_host_bytes / 2 ** 20), backgroundColor: "#ccbb44"}]},
  options: {...base, indexAxis: "y", scales: {x: axis("MiB"), y: {ticks: whole}}}});
const lanes = [...new Set(report.timeline.map(s => s[0]))];
draw("timeline", [...lanes, ...lanes], {type: "bar", data: {labels: lanes, datasets: [{label: "busy",
  data: report.timeline.map(s => ({y: s[0], x: [s[2], s[3]], name: s[1]})),
  backgroundColor: report.timeline.map(s => colors[lanes.indexOf(s[0]) % colors.length]),
  borderColor: "#ffffff", borderWidth: report.timeline.length < window.innerWidth / 6 ? 0.5 : 0, borderSkipped: false,
  minBarLength: 1, grouped: false}]},
  options: {...base, indexAxis: "y", scales: {x: axis("seconds")},
    plugins: {legend: {display: false}, tooltip: {callbacks: {label: c => c.raw.name}}}}});
// A page is narrower than a window, and ends.
addEventListener("beforeprint", () => charts.forEach(c => c.resize(Math.min(680, c.width), Math.min(850, c.height))));
addEventListener("afterprint", () => charts.forEach(chart => chart.resize()));
)html";

}  // namespace

const BenchRow* BenchReport::best() const {
  const BenchRow* best = nullptr;
  for (const BenchRow& row : rows) {
    if (row.fits() && (best == nullptr || row.step_seconds() < best->step_seconds())) best = &row;
  }
  return best;
}

std::string BenchReport::json() const {
  Json json{{"machine", machine},
            {"model", model},
            {"command", command},
            {"version", version},
            {"parameters", parameters},
            {"tokens_per_step", tokens},
            {"compute_measured", compute_measured},
            {"policies", Json::array()}};
  // In a sweep, the row of auto's choice where it was fastest.
  const BenchRow* chosen = nullptr;
  for (const BenchRow& row : rows) {
    json["policies"].push_back(json_of(row));
    const bool faster = chosen == nullptr || row.step_seconds() < chosen->step_seconds();
    if (row.policy == "auto" && row.fits() && faster) chosen = &row;
  }
  json["best"] = best() != nullptr ? Json(best()->policy) : Json(nullptr);
  if (best() != nullptr && !best()->setting.empty()) json["best_setting"] = json_of(*best())["setting"];
  json["chosen_by_auto"] = chosen != nullptr ? Json(chosen->resolved) : Json(nullptr);
  if (missing > 0) json["missing"] = missing;
  json["bound"] = Json::array();
  for (const BoundPoint& b : bound) {
    Json point{{"cpu_share", b.cpu_share}, {"parameters_per_second", b.parameters_per_second}};
    if (!b.machine.empty()) point["machine"] = b.machine;
    json["bound"].push_back(std::move(point));
  }
  return json_document(json);
}

std::string BenchReport::html() const {
  Json data = parse_json<Json>(json());
  data["timeline"] = timeline.empty() ? Json::array() : timeline_of(timeline);
  HtmlPage page("tandem bench");
  page.add(
      fmt::format("<h1>{}</h1>\n<p>{}<br><code>{}</code></p>\n", escaped(model), escaped(machine), escaped(command)));
  if (best() != nullptr) {
    page.add(
        fmt::format("<p>Best: <b>{}</b>, {:.4f} s a step.</p>\n", escaped(best()->name()), best()->step_seconds()));
  }
  if (missing > 0) page.add(fmt::format("<p>Interrupted: {} rows are missing.</p>\n", missing));
  page.add(
      "<table><tr><th>policy</th><th>predicted, s</th><th>measured, s</th><th>spread</th><th>error</th>"
      "<th>tokens/s</th><th>bound by</th><th>to device / host</th><th>device memory</th></tr>\n" +
      table_rows(*this) + "</table>\n");
  if (const std::string digest = digest_of(rows); !digest.empty()) {
    page.add(fmt::format("<p>State digest of every row that was measured: <code>{}</code></p>\n", digest));
  }
  page.add_plot("Step time by phase", "steps");
  const bool swept = std::any_of(rows.begin(), rows.end(), [](const BenchRow& row) { return !row.setting.empty(); });
  if (swept) page.add_plot("Step time by setting", "sweep");
  page.add_plot("Update rate by share", "updates");
  page.add_plot("Memory by policy", "memory");
  page.add_plot(best() == nullptr ? "Timeline of one step"
                                  : fmt::format("Timeline of one step: {}, simulated", escaped(best()->name())),
                "timeline");
  return std::move(page).finish(data, plots);
}

std::string BenchReport::table() const {
  std::size_t width = 26;
  for (const BenchRow& row : rows) width = std::max(width, row.name().size() + 2);
  std::string text = fmt::format("{:<{}}{:>12}{:>12}{:>8}{:>8}{:>14}  {}\n", "policy", width, "predicted, s",
                                 "measured, s", "spread", "error", "tokens/s", "bound by");
  for (const BenchRow& row : rows) {
    if (!row.fits()) {
      text += fmt::format("{:<{}}{}\n", row.name(), width, row.refusal);
      continue;
    }
    text += fmt::format("{:<{}}{:>12.4f}{:>12}{:>8}{:>8}{:>14.0f}  {}\n", row.name(), width, row.predicted.step_seconds,
                        measured_of(row), spread_of(row), error_of(row), tokens / row.step_seconds(),
                        row.predicted.bound_by);
  }
  if (best() != nullptr) text += fmt::format("best: {}\n", best()->name());
  return text;
}

}  // namespace tandem
