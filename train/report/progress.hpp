#pragma once
// Progress of a run for people: one live line on a terminal, plain lines elsewhere.
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "train/report/run_directory.hpp"
#include "train/report/terminal.hpp"

namespace tandem {

/// Takes the live line off the terminal, so that other output does not stand behind it; the next step draws it anew.
/// Any thread may call it.
void clear_live_line() noexcept;

class Progress {
 public:
  /// Prints to standard output. A line stays every `every` steps; on a terminal with `every` 1 only the live line is
  /// drawn anew. `every` 0: no step lines. `quiet`: nothing at all.
  Progress(std::int64_t steps, std::int64_t every, bool quiet);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void line(const std::string& text);
  /// A step has been taken; an evaluation in it gets a line of its own. `saving`: share of a checkpoint under way.
  void step(const StepMetrics& metrics, std::optional<double> saving = std::nullopt);

 private:
  /// Part of a line that is shown as a whole or not at all.
  struct Field {
    std::string text;
    Style style = Style::plain;
  };

  std::vector<Field> fields_of(const StepMetrics& metrics, std::optional<double> saving,
                               std::optional<double> eval_loss) const;
  std::string fitted(const std::vector<Field>& fields, const std::string& bar = {}) const;
  void keep(const std::string& text);
  void redraw(const std::string& text);

  std::int64_t steps_;
  std::int64_t every_;
  bool quiet_;
  Terminal terminal_;
  double smoothed_ = 0.0;            // seconds a step
  std::optional<double> eval_loss_;  // last one
};

}  // namespace tandem
