#include "train/report/progress.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <limits>
#include <string_view>

#include "train/config/units.hpp"

namespace tandem {
namespace {

constexpr std::string_view between = "  ";  // between two fields

std::atomic<bool> live{false};  ///< whether the terminal's last line is the live one

std::string rate(double tokens_per_second) {
  return tokens_per_second >= 10000 ? fmt::format("{:.1f}k", tokens_per_second / 1000.0)
                                    : fmt::format("{:.0f}", tokens_per_second);
}

std::string text_of(const PairMetrics& pairs) {
  return fmt::format("margin {:.4f} right {:.0f}%", without_nan_sign(pairs.margin), 100.0 * pairs.accuracy);
}

std::string bar_of(std::int64_t step, std::int64_t steps) {
  constexpr std::int64_t width = 20;
  const auto filled = static_cast<std::size_t>(width * step / std::max<std::int64_t>(1, steps));
  return fmt::format("[{}{}]", std::string(filled, '='), std::string(width - filled, ' '));
}

}  // namespace

void clear_live_line() noexcept {
  if (!live.exchange(false)) return;
  std::fputs("\r\x1b[K", stdout);
  std::fflush(stdout);
}

Progress::Progress(std::int64_t steps, std::int64_t every, bool quiet)
    : steps_(steps), every_(every), quiet_(quiet), terminal_(Terminal::of_standard_output()) {}

Progress::~Progress() {
  if (live.exchange(false)) std::fputs("\n", stdout);
  std::fflush(stdout);
}

void Progress::line(const std::string& text) {
  if (quiet_) return;
  if (live.exchange(false)) std::fputs("\n", stdout);
  std::fputs((text + "\n").c_str(), stdout);
  std::fflush(stdout);
}

/// The fields of a step, those that matter most first.
std::vector<Progress::Field> Progress::fields_of(const StepMetrics& m, std::optional<double> saving,
                                                 std::optional<double> eval_loss) const {
  const int width = static_cast<int>(std::to_string(steps_).size());
  std::vector<Field> fields{{fmt::format("step {:>{}}/{}", m.step, width, steps_)}};
  if (m.skipped) fields.push_back({"SKIPPED", Style::warning});
  fields.push_back({fmt::format("loss {:.4f}", without_nan_sign(m.loss)), Style::bold});
  if (m.pairs) fields.push_back({text_of(*m.pairs)});
  if (eval_loss) fields.push_back({fmt::format("eval {:.4f}", without_nan_sign(*eval_loss)), Style::good});
  fields.push_back({fmt::format("ETA {}", format_duration(smoothed_ * static_cast<double>(steps_ - m.step)))});
  if (saving) fields.push_back({fmt::format("saving {:.0f}%", 100.0 * *saving)});
  fields.push_back({fmt::format("{} tok/s", rate(m.tokens_per_second))});
  fields.push_back({fmt::format("{:.3f} s", m.step_seconds)});
  fields.push_back({fmt::format("norm {:.2f}", without_nan_sign(m.grad_norm)), Style::faint});
  fields.push_back({fmt::format("lr {:.1e}", m.lr), Style::faint});
  fields.push_back({fmt::format("update {:.3f} s exposed", m.exposed_update_seconds), Style::faint});
  return fields;
}

/// The first fields, as many as the terminal has room for, and the bar before them where there is room for all.
std::string Progress::fitted(const std::vector<Field>& fields, const std::string& bar) const {
  const auto width = terminal_.width();
  // A line that fills the terminal would go on in the next one.
  const std::size_t room = width ? *width - 1 : std::numeric_limits<std::size_t>::max();
  std::string text;
  std::size_t used = 0;
  std::size_t shown = 0;
  for (const Field& field : fields) {
    const std::size_t more = field.text.size() + (shown > 0 ? between.size() : 0);
    if (used + more > room) break;
    if (shown++ > 0) text += between;
    text += terminal_.painted(field.text, field.style);
    used += more;
  }
  const bool has_room = width && shown == fields.size() && used + between.size() + bar.size() <= room;
  return has_room && !bar.empty() ? fmt::format("{}{}{}", bar, between, text) : text;
}

/// A line that stays, in place of the live one.
void Progress::keep(const std::string& text) {
  clear_live_line();
  line(text);
}

void Progress::redraw(const std::string& text) {
  std::fputs(("\r\x1b[K" + text).c_str(), stdout);
  std::fflush(stdout);
  live = true;
}

void Progress::step(const StepMetrics& m, std::optional<double> saving) {
  constexpr double weight = 0.1;  // weight of the newest step: the rate neither jumps nor lags
  smoothed_ = smoothed_ == 0.0 ? m.step_seconds : (1.0 - weight) * smoothed_ + weight * m.step_seconds;
  if (quiet_) return;
  const bool last = m.step == steps_;
  const bool due = every_ > 0 && (m.step % every_ == 0 || last);
  const bool keeps = due && (!terminal_.redraws() || every_ > 1 || last);
  if (keeps) keep(fitted(fields_of(m, saving, std::nullopt)));
  if (m.eval_loss) {
    eval_loss_ = m.eval_loss;
    const std::string pairs = m.eval_pairs ? fmt::format(", {}", text_of(*m.eval_pairs)) : std::string();
    const std::string text =
        fmt::format("eval loss {:.4f}{} after step {}", without_nan_sign(*m.eval_loss), pairs, m.step);
    keep(terminal_.painted(text, Style::good));
  }
  if (every_ == 0 || keeps || !terminal_.redraws()) return;
  redraw(fitted(fields_of(m, saving, eval_loss_), bar_of(m.step, steps_)));
}

}  // namespace tandem
