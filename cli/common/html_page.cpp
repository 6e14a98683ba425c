#include "cli/common/html_page.hpp"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "core/base/json_text.hpp"

namespace tandem {
namespace {

/// JSON that may stand inside a script: nothing in it ends the element.
std::string in_script(const nlohmann::ordered_json& json) {
  std::string text = json_text(json);
  for (std::size_t at = text.find("</"); at != std::string::npos; at = text.find("</", at + 3))
    text.insert(at + 1, 1, '\\');
  return text;
}

// The policy of its content keeps the page from asking any network for anything.
constexpr std::string_view head = R"html(<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'">
)html";

constexpr std::string_view style = R"html(<style>
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:0 auto;padding:1rem;color:#222;background:#fff}
h1{margin:0}h2{margin-top:2rem}code{font-size:.75rem}p code{overflow-wrap:anywhere}
table{border-collapse:collapse;width:100%;display:block;overflow-x:auto;font-size:.9rem}
td,th{border-bottom:1px solid #ccc;padding:.25rem .5rem;text-align:left}th,td:not([colspan]){white-space:nowrap}
.facts td{white-space:normal;overflow-wrap:anywhere}.facts td:first-child{white-space:nowrap}
.plot{position:relative;height:22rem;margin:1rem 0}
@media print{body{max-width:none;padding:0}h2{break-after:avoid}.plot{break-inside:avoid;max-height:850px}
table{font-size:.65rem;display:table}td code{font-size:.6rem;white-space:normal;overflow-wrap:anywhere}}
</style></head><body>
)html";

}  // namespace

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

HtmlPage::HtmlPage(std::string_view title) : text_(fmt::format("{}<title>{}</title>{}", head, escaped(title), style)) {}

void HtmlPage::add_plot(std::string_view heading, std::string_view id) {
  add(fmt::format(
      "<h2>{0}</h2><div class=\"plot\"><canvas id=\"{1}\" role=\"img\" aria-label=\"{0}\"></canvas></div>\n", heading,
      id));
}

std::string HtmlPage::finish(const nlohmann::ordered_json& data, std::string_view script) && {
  add(fmt::format("<script type=\"application/json\" id=\"report\">{}</script>\n<script>", in_script(data)));
  add(chart_library());
  add("</script>\n<script>");
  add(script);
  add("</script></body></html>\n");
  return std::move(text_);
}

}  // namespace tandem
