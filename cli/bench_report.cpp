#include "cli/bench_report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "core/error.hpp"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

double share_of(std::int64_t part, const Plan::Shares& shares) {
  return static_cast<double>(part) / std::max(1.0, static_cast<double>(shares.cpu + shares.streamed + shares.resident));
}

Json json_of(const PolicyResult& p, double tokens) {
  if (!p.refusal.empty()) return {{"policy", p.policy}, {"fits", false}, {"why", p.refusal}};
  Json json{{"policy", p.policy},
            {"fits", true},
            {"resolved", p.resolved},
            {"plan",
             {{"cpu_share", share_of(p.shares.cpu, p.shares)},
              {"gpu_streamed_share", share_of(p.shares.streamed, p.shares)},
              {"resident_share", share_of(p.shares.resident, p.shares)}}},
            {"predicted",
             {{"step_seconds", p.predicted.step_seconds},
              {"forward_seconds", p.predicted.forward_seconds},
              {"backward_seconds", p.predicted.backward_seconds},
              {"update_seconds", p.predicted.update_seconds},
              {"exposed_update_seconds", p.predicted.exposed_update_seconds},
              {"tokens_per_second", tokens / p.predicted.step_seconds},
              {"bound_by", name_of(p.predicted.bound_by())}}},
            {"measured", nullptr},
            {"planned_device_bytes", p.planned_device_bytes},
            {"planned_host_bytes", p.planned_host_bytes},
            {"peak_device_bytes", nullptr},
            {"state_digest", nullptr}};
  if (!p.measured) return json;
  const MeasuredStep& m = *p.measured;
  const bool compute = m.forward_seconds + m.backward_seconds - m.exposed_update_seconds >= 0.5 * m.step_seconds;
  json["measured"] = {{"step_seconds", m.step_seconds},
                      {"forward_seconds", m.forward_seconds},
                      {"backward_seconds", m.backward_seconds},
                      {"update_seconds", m.update_seconds},
                      {"exposed_update_seconds", m.exposed_update_seconds},
                      {"tokens_per_second", m.tokens_per_second},
                      {"bound_by", compute ? "compute" : "update"}};
  json["peak_device_bytes"] = p.peak_device_bytes;
  json["state_digest"] = p.state_digest;
  return json;
}

double step_of(const PolicyResult& p) { return p.measured ? p.measured->step_seconds : p.predicted.step_seconds; }

/// Spans of a trace as [lane, name, begin, end] in seconds; the first ones where there are many.
Json spans_of(const std::filesystem::path& trace) {
  constexpr std::size_t most = 4000;
  constexpr double microseconds = 1e6;
  Json spans = Json::array();
  std::ifstream in(trace);
  const Json root = Json::parse(in, nullptr, false);
  if (!root.is_object()) return spans;
  std::vector<std::string> lanes;
  for (const Json& event : root.at("traceEvents")) {
    const auto tid = event.value("tid", std::size_t{0});
    if (event.value("ph", "") == "M" && event.value("name", "") == "thread_name") {
      if (lanes.size() <= tid) lanes.resize(tid + 1);
      lanes[tid] = event.at("args").value("name", "");
    }
  }
  for (const Json& event : root.at("traceEvents")) {
    const auto tid = event.value("tid", std::size_t{0});
    if (event.value("ph", "") != "X" || tid >= lanes.size() || spans.size() >= most) continue;
    const double begin = event.value("ts", 0.0) / microseconds;
    spans.push_back({lanes[tid], event.value("name", ""), begin, begin + event.value("dur", 0.0) / microseconds});
  }
  return spans;
}

/// JSON that may stand inside a script: nothing in it ends the element.
std::string in_script(const Json& json) {
  std::string text = json.dump(-1, ' ', false, Json::error_handler_t::replace);
  for (std::size_t at = text.find("</"); at != std::string::npos; at = text.find("</", at + 3))
    text.insert(at + 1, "\\");
  return text;
}

std::string escaped(std::string_view text) {
  std::string result;
  for (const char c : text) {
    switch (c) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '"':
        result += "&quot;";
        break;
      default:
        result += c;
    }
  }
  return result;
}

std::string rows_of(const BenchReport& report) {
  std::string rows;
  for (const PolicyResult& p : report.policies) {
    if (!p.refusal.empty()) {
      rows += fmt::format("<tr><td>{}</td><td colspan=\"6\">{}</td></tr>\n", escaped(p.policy), escaped(p.refusal));
      continue;
    }
    const std::string measured = p.measured ? fmt::format("{:.4f}", p.measured->step_seconds) : "-";
    const std::string error =
        p.measured ? fmt::format("{:+.0f}%", 100.0 * (p.predicted.step_seconds / p.measured->step_seconds - 1.0)) : "-";
    rows += fmt::format(
        "<tr><td>{}</td><td>{:.4f}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td><code>{}</code></td></tr>\n",
        escaped(p.policy), p.predicted.step_seconds, measured, error, name_of(p.predicted.bound_by()),
        format_bytes(p.planned_device_bytes), p.state_digest.empty() ? "-" : p.state_digest);
  }
  return rows;
}

constexpr std::string_view head = R"html(<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>tandem bench</title><style>
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:0 auto;padding:1rem;color:#222;background:#fff}
h2{margin-top:2rem}table{border-collapse:collapse;width:100%;display:block;overflow-x:auto;font-size:.9rem}
td,th{border-bottom:1px solid #ccc;padding:.25rem .5rem;text-align:left}code{font-size:.75rem}
.plot{position:relative;height:22rem;margin:1rem 0}@media print{.plot{break-inside:avoid;height:18rem}}
</style></head><body>
)html";

constexpr std::string_view plots = R"html(
const report = JSON.parse(document.getElementById("report").textContent);
const fit = report.policies.filter(p => p.fits);
const names = fit.flatMap(p => p.measured ? [p.policy + ", measured", p.policy + ", predicted"] : [p.policy + ", predicted"]);
const steps = fit.flatMap(p => p.measured ? [p.measured, p.predicted] : [p.predicted]);
const exposed = s => Math.min(s.exposed_update_seconds, s.forward_seconds);
const base = {responsive: true, maintainAspectRatio: false, animation: false};
const axis = text => ({title: {display: true, text}, beginAtZero: true});
new Chart("steps", {type: "bar", data: {labels: names, datasets: [
  {label: "forward", data: steps.map(s => s.forward_seconds - exposed(s)), backgroundColor: "#4477aa"},
  {label: "backward", data: steps.map(s => s.backward_seconds), backgroundColor: "#66ccee"},
  {label: "waiting for updates", data: steps.map(exposed), backgroundColor: "#ee6677"},
  {label: "rest", data: steps.map(s => Math.max(0, s.step_seconds - s.forward_seconds - s.backward_seconds)), backgroundColor: "#bbbbbb"}]},
  options: {...base, indexAxis: "y", scales: {x: {...axis("seconds a step"), stacked: true}, y: {stacked: true}}}});
const rate = s => report.parameters / s.update_seconds / 1e9;
const updates = key => fit.filter(p => p[key] && p[key].update_seconds > 0).map(p => ({x: p.plan.cpu_share, y: rate(p[key]), name: p.policy}));
new Chart("updates", {type: "scatter", data: {datasets: [
  {label: "closed form, nothing resident", data: report.bound.map(b => ({x: b.cpu_share, y: b.parameters_per_second / 1e9})), showLine: true, pointRadius: 0, borderColor: "#222222"},
  {label: "measured", data: updates("measured"), backgroundColor: "#ee6677", pointRadius: 6},
  {label: "predicted", data: updates("predicted"), backgroundColor: "#4477aa", pointStyle: "triangle", pointRadius: 6}]},
  options: {...base, scales: {x: {...axis("share updated on the CPU"), max: 1}, y: axis("1e9 parameters a second")},
    plugins: {tooltip: {callbacks: {label: c => (c.raw.name || "") + " " + c.raw.y.toFixed(3)}}}}});
new Chart("memory", {type: "bar", data: {labels: fit.map(p => p.policy), datasets: [
  {label: "device", data: fit.map(p => p.planned_device_bytes / 2 ** 20), backgroundColor: "#4477aa"},
  {label: "host", data: fit.map(p => p.planned_host_bytes / 2 ** 20), backgroundColor: "#ccbb44"}]},
  options: {...base, scales: {y: axis("MiB")}}});
const lanes = [...new Set(report.timeline.map(s => s[0]))];
new Chart("timeline", {type: "bar", data: {labels: lanes, datasets: [{label: "one step, simulated",
  data: report.timeline.map(s => ({y: s[0], x: [s[2], s[3]], name: s[1]})), backgroundColor: "#228833",
  borderColor: "#ffffff", borderWidth: 0.5, borderSkipped: false, grouped: false}]},
  options: {...base, indexAxis: "y", scales: {x: axis("seconds")},
    plugins: {tooltip: {callbacks: {label: c => c.raw.name}}}}});
)html";

}  // namespace

const PolicyResult* BenchReport::best() const {
  const PolicyResult* best = nullptr;
  for (const PolicyResult& p : policies) {
    if (p.refusal.empty() && (best == nullptr || step_of(p) < step_of(*best))) best = &p;
  }
  return best;
}

std::string BenchReport::json() const {
  Json json{{"machine", machine},        {"model", model},           {"command", command}, {"parameters", parameters},
            {"tokens_per_step", tokens}, {"policies", Json::array()}};
  Json chosen = nullptr;
  for (const PolicyResult& p : policies) {
    json["policies"].push_back(json_of(p, tokens));
    if (p.policy == "auto" && p.refusal.empty()) chosen = p.resolved;
  }
  json["best"] = best() != nullptr ? Json(best()->policy) : Json(nullptr);
  json["chosen_by_auto"] = chosen;
  json["bound"] = Json::array();
  for (const BoundPoint& b : bound) {
    json["bound"].push_back({{"cpu_share", b.cpu_share}, {"parameters_per_second", b.parameters_per_second}});
  }
  return json.dump(2) + "\n";
}

std::string BenchReport::html() const {
  Json data = Json::parse(json());
  data["timeline"] = timeline.empty() ? Json::array() : spans_of(timeline);
  const PolicyResult* first = best();
  std::string page(head);
  page +=
      fmt::format("<h1>{}</h1>\n<p>{}<br><code>{}</code></p>\n", escaped(model), escaped(machine), escaped(command));
  if (first != nullptr) {
    page += fmt::format("<p>Best: <b>{}</b>, {:.4f} s a step.</p>\n", escaped(first->policy), step_of(*first));
  }
  page +=
      "<table><tr><th>policy</th><th>predicted, s</th><th>measured, s</th><th>error</th><th>bound by</th>"
      "<th>device memory</th><th>state digest</th></tr>\n" +
      rows_of(*this) + "</table>\n";
  const auto plot = [&](std::string_view title, std::string_view id) {
    page += fmt::format(
        "<h2>{0}</h2><div class=\"plot\"><canvas id=\"{1}\" role=\"img\" aria-label=\"{0}\"></canvas></div>\n", title,
        id);
  };
  plot("Step time by phase", "steps");
  plot("Update rate by share", "updates");
  plot("Memory by policy", "memory");
  plot("Timeline of one step", "timeline");
  page += fmt::format("<script type=\"application/json\" id=\"report\">{}</script>\n<script>", in_script(data));
  page += chart_library();
  page += "</script>\n<script>";
  page += plots;
  page += "</script></body></html>\n";
  return page;
}

std::string BenchReport::table() const {
  std::string text = fmt::format("{:<26}{:>12}{:>12}{:>8}{:>14}  {}\n", "policy", "predicted", "measured", "error",
                                 "tokens/s", "bound by");
  for (const PolicyResult& p : policies) {
    if (!p.refusal.empty()) {
      text += fmt::format("{:<26}{}\n", p.policy, p.refusal);
      continue;
    }
    const std::string measured = p.measured ? fmt::format("{:.4f} s", p.measured->step_seconds) : "-";
    const std::string error =
        p.measured ? fmt::format("{:+.0f}%", 100.0 * (p.predicted.step_seconds / p.measured->step_seconds - 1.0)) : "-";
    text += fmt::format("{:<26}{:>10.4f} s{:>12}{:>8}{:>14.0f}  {}\n", p.policy, p.predicted.step_seconds, measured,
                        error, tokens / step_of(p), name_of(p.predicted.bound_by()));
  }
  if (best() != nullptr) text += fmt::format("best: {}\n", best()->policy);
  return text;
}

}  // namespace tandem
