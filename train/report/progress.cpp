#include "train/report/progress.hpp"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "train/config/units.hpp"

namespace tandem {
namespace {

std::string rate(double tokens_per_second) {
  return tokens_per_second >= 10000 ? fmt::format("{:.1f}k", tokens_per_second / 1000.0)
                                    : fmt::format("{:.0f}", tokens_per_second);
}

std::string bar(std::int64_t step, std::int64_t steps) {
  constexpr std::int64_t width = 20;
  const auto filled = static_cast<std::size_t>(width * step / std::max<std::int64_t>(1, steps));
  return fmt::format("[{}{}] ", std::string(filled, '='), std::string(width - filled, ' '));
}

/// Part of a line that the terminal shows: a longer one would leave a line behind at every redraw.
std::string fitted(std::string text) {
  winsize size{};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return text;
  if (text.size() >= size.ws_col) text.resize(size.ws_col - 1U);
  return text;
}

}  // namespace

Progress::Progress(std::int64_t steps, std::int64_t every, bool quiet)
    : steps_(steps), every_(every), quiet_(quiet), terminal_(::isatty(STDOUT_FILENO) == 1) {}

Progress::~Progress() {
  if (live_) std::fputs("\n", stdout);
  std::fflush(stdout);
}

void Progress::line(const std::string& text) {
  if (quiet_) return;
  if (live_) std::fputs("\n", stdout);
  live_ = false;
  std::fputs(text.c_str(), stdout);
  std::fputs("\n", stdout);
  std::fflush(stdout);
}

void Progress::step(const StepMetrics& m, std::optional<double> saving) {
  constexpr double weight = 0.1;  // weight of the newest step: the rate neither jumps nor lags
  smoothed_ = smoothed_ == 0.0 ? m.step_seconds : (1.0 - weight) * smoothed_ + weight * m.step_seconds;
  if (quiet_ || every_ == 0 || (m.step % every_ != 0 && m.step != steps_)) return;
  const int width = static_cast<int>(std::to_string(steps_).size());
  std::string text = fmt::format(
      "step {:>{}}/{}  loss {:.4f}  norm {:.2f}  lr {:.1e}  {} tok/s  {:.3f} s (update {:.3f} exposed)  ETA {}", m.step,
      width, steps_, without_nan_sign(m.loss), without_nan_sign(m.grad_norm), m.lr, rate(m.tokens_per_second),
      m.step_seconds, m.exposed_update_seconds, format_duration(smoothed_ * static_cast<double>(steps_ - m.step)));
  if (m.skipped) text += "  SKIPPED";
  if (m.eval_loss) text += fmt::format("  eval {:.4f}", without_nan_sign(*m.eval_loss));
  if (saving) text += fmt::format("  saving {:.0f}%", 100.0 * *saving);
  if (!terminal_) return line(text);
  std::fputs(fmt::format("\r\x1b[K{}", fitted(bar(m.step, steps_) + text)).c_str(), stdout);
  std::fflush(stdout);
  live_ = true;
}

}  // namespace tandem
