#pragma once
// One self-contained HTML page with plots, for reports: it asks no network for anything.
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace tandem {

/// Text as it may stand in HTML.
std::string escaped(std::string_view text);

class HtmlPage {
 public:
  /// `title`: of the window, plain text; also the mark by which a file is known to be such a page.
  explicit HtmlPage(std::string_view title);

  /// Appends HTML.
  void add(std::string_view html) { text_ += html; }
  /// Appends a heading (HTML) and a canvas that `script` draws on.
  void add_plot(std::string_view heading, std::string_view id);
  /// Ends the page with data, the plotting library, and the script that draws: it finds the data under the element id
  /// "report". Returns the page.
  std::string finish(const nlohmann::ordered_json& data, std::string_view script) &&;

 private:
  std::string text_;
};

/// Chart.js, which draws the plots, minified; embedded when tandem is built.
std::string_view chart_library() noexcept;

}  // namespace tandem
