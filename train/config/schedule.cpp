#include "train/config/schedule.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <numbers>

#include "core/base/error.hpp"

namespace tandem {
namespace {

constexpr std::array kinds{Schedule::Kind::constant, Schedule::Kind::linear, Schedule::Kind::cosine,
                           Schedule::Kind::wsd};

std::string text_of(const Schedule& s, const std::string& lr, const std::string& min_lr) {
  return fmt::format("{} lr {} to {}, warm-up {}, decay {}, {} steps", name_of(s.kind), lr, min_lr, s.warmup_steps,
                     s.decay_steps, s.steps);
}

}  // namespace

double Schedule::at(std::int64_t step) const noexcept {
  if (step < warmup_steps) return lr * static_cast<double>(step) / static_cast<double>(warmup_steps);
  if (kind == Kind::constant) return lr;
  const bool last = kind == Kind::wsd;
  const std::int64_t length = decay_steps > 0 ? decay_steps : last ? std::max<std::int64_t>(1, steps / 10) : steps;
  const std::int64_t end = last ? steps : length;
  const std::int64_t begin = last ? std::max(warmup_steps, steps - length) : warmup_steps;
  if (step >= end) return end > begin || step > end ? min_lr : lr;
  if (step <= begin) return lr;
  const double progress = static_cast<double>(step - begin) / static_cast<double>(end - begin);
  const double share = kind == Kind::cosine ? 0.5 * (1.0 + std::cos(std::numbers::pi * progress)) : 1.0 - progress;
  return min_lr + (lr - min_lr) * share;
}

std::string Schedule::text() const { return text_of(*this, fmt::to_string(lr), fmt::to_string(min_lr)); }

std::string Schedule::brief() const { return text_of(*this, fmt::format("{:.6g}", lr), fmt::format("{:.6g}", min_lr)); }

std::optional<Schedule> Schedule::of_text(const std::string& text) {
  char name[16];
  Schedule s;
  long long warmup = 0, decay = 0, all = 0;
  if (std::sscanf(text.c_str(), "%15s lr %lf to %lf, warm-up %lld, decay %lld, %lld steps", name, &s.lr, &s.min_lr,
                  &warmup, &decay, &all) != 6) {
    return {};
  }
  s.warmup_steps = warmup;
  s.decay_steps = decay;
  s.steps = all;
  for (const auto kind : kinds) {
    s.kind = kind;
    if (name_of(kind) == name) return s;
  }
  return {};
}

bool Schedule::agrees_with(const Schedule& other, std::int64_t step) const noexcept {
  for (std::int64_t s = 1; s <= step; ++s) {
    if (at(s) != other.at(s)) return false;
  }
  return true;
}

Schedule::Kind parse_schedule(std::string_view text) {
  for (const auto kind : kinds) {
    if (name_of(kind) == text) return kind;
  }
  throw UsageError(fmt::format("'{}'", text), "not a schedule", "use constant, linear, cosine or wsd");
}

std::string_view name_of(Schedule::Kind kind) noexcept {
  switch (kind) {
    case Schedule::Kind::constant:
      return "constant";
    case Schedule::Kind::linear:
      return "linear";
    case Schedule::Kind::cosine:
      return "cosine";
    case Schedule::Kind::wsd:
      return "wsd";
  }
  return "unknown";
}

}  // namespace tandem
