#include "train/config/units.hpp"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <utility>

#include "core/base/error.hpp"

namespace tandem {
namespace {

struct Suffix {
  std::string_view text;
  double factor;
};
constexpr std::array<Suffix, 8> prefixes{
    {{"Ki", 0x1p10}, {"Mi", 0x1p20}, {"Gi", 0x1p30}, {"Ti", 0x1p40}, {"k", 1e3}, {"K", 1e3}, {"M", 1e6}, {"G", 1e9}}};
constexpr std::array<Suffix, 2> large{{{"T", 1e12}, {"B", 1e9}}};

bool take_suffix(std::string_view& text, std::string_view suffix) {
  if (!text.ends_with(suffix)) return false;
  text.remove_suffix(suffix.size());
  return true;
}

double factor_of(std::string_view& text) {
  for (const auto& prefix : prefixes) {
    if (take_suffix(text, prefix.text)) return prefix.factor;
  }
  return take_suffix(text, large[0].text) ? large[0].factor : 1.0;
}

[[noreturn]] void refuse(std::string_view text, std::string_view form) {
  throw UsageError(fmt::format("'{}'", text), "not understood", form);
}

double scaled(std::string_view whole, std::string_view number, double factor, std::string_view form) {
  double value = 0.0;
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), value);
  if (error != std::errc() || end != number.data() + number.size() || !std::isfinite(value) || value < 0.0 ||
      value * factor > 9e18) {
    refuse(whole, form);
  }
  return value * factor;
}

std::string print_scaled(std::uint64_t value, std::string_view unit) {
  constexpr std::array<std::pair<std::string_view, int>, 3> binary{{{"Gi", 30}, {"Mi", 20}, {"Ki", 10}}};
  for (const auto& [prefix, shift] : binary) {
    const std::uint64_t one = std::uint64_t{1} << shift;
    if (value >= one && value % one == 0) return fmt::format("{}{}{}", value >> shift, prefix, unit);
  }
  return fmt::format("{}{}", value, unit);
}

}  // namespace

std::size_t parse_size(std::string_view text) {
  constexpr std::string_view form = "write bytes as 8GiB, 512MiB or 300MB";
  std::string_view number = text;
  take_suffix(number, "B");
  const double factor = factor_of(number);
  return static_cast<std::size_t>(scaled(text, number, factor, form));
}

std::string print_size(std::size_t bytes) { return print_scaled(bytes, "B"); }

double parse_bandwidth(std::string_view text) {
  constexpr std::string_view form = "write a bandwidth as 1GB/s or 250MiB/s";
  std::string_view number = text;
  if (!take_suffix(number, "B/s")) refuse(text, form);
  const double factor = factor_of(number);
  const double value = scaled(text, number, factor, form);
  if (value < 1.0) refuse(text, form);  // printed bandwidths are whole
  return value;
}

std::string print_bandwidth(double bytes_per_second) {
  return print_scaled(static_cast<std::uint64_t>(bytes_per_second), "B/s");
}

std::int64_t parse_count(std::string_view text) {
  std::string_view number = text;
  double factor = take_suffix(number, large[1].text) ? large[1].factor : factor_of(number);
  return static_cast<std::int64_t>(scaled(text, number, factor, "write a count as 4096, 100M or 1Mi"));
}

std::int64_t parse_integer(std::string_view text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) refuse(text, "write a whole number");
  return value;
}

double parse_number(std::string_view text) {
  double value = 0.0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value)) {
    refuse(text, "write a number, such as 3e-4");
  }
  return value;
}

std::string print_number(double value) { return fmt::format("{}", value); }

double without_nan_sign(double value) { return std::isnan(value) ? std::numeric_limits<double>::quiet_NaN() : value; }

std::string format_count(std::int64_t count) {
  const auto n = static_cast<double>(count);
  if (n >= 1e9) return fmt::format("{:.2f} B", n / 1e9);
  if (n >= 1e6) return fmt::format("{:.1f} M", n / 1e6);
  if (n >= 1e3) return fmt::format("{:.1f} k", n / 1e3);
  return fmt::format("{}", count);
}

std::string format_duration(double seconds) {
  constexpr double longest = 1e15;  // far within int64, whatever a rate of next to nothing foretells
  const auto s = static_cast<std::int64_t>(std::min(longest, std::max(0.0, std::round(seconds))));
  return fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
}

}  // namespace tandem
