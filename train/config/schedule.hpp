#pragma once
// The learning rate as a function of the step.
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tandem {

struct Schedule {
  ///  `constant` stays; `linear` and `cosine` fall from lr to min_lr, reached at step `decay_steps`;
  ///  `wsd` (warm up, stay, decay) stays and falls in a line over the last `decay_steps`.
  enum class Kind : std::uint8_t { constant, linear, cosine, wsd };
  Kind kind = Kind::cosine;
  double lr = 3e-4;
  double min_lr = 3e-5;
  std::int64_t warmup_steps = 0;
  std::int64_t decay_steps = 0;  ///< 0: all steps (linear, cosine), a tenth of them (wsd)
  std::int64_t steps = 1;

  /// Learning rate of step 1 ... steps. Warm-up rises in a line and reaches lr at step `warmup_steps`.
  double at(std::int64_t step) const noexcept;
  /// Exact text, from which `of_text` makes an equal schedule.
  std::string text() const;
  /// Text for people: rates to six digits.
  std::string brief() const;
  /// The schedule with this `text()`; none for other text.
  static std::optional<Schedule> of_text(const std::string& text);
  /// Whether the steps up to `step` are taken at the same rates.
  bool agrees_with(const Schedule& other, std::int64_t step) const noexcept;
};

/// Throws UsageError.
Schedule::Kind parse_schedule(std::string_view text);
std::string_view name_of(Schedule::Kind kind) noexcept;

}  // namespace tandem
