#include "scheduler/plan/policy.hpp"

#include <fmt/format.h>

#include <charconv>
#include <optional>

#include "core/base/error.hpp"

namespace tandem {
namespace {

constexpr std::string_view forms =
    "one of auto, device, host, static:R (0 <= R <= 1), interleave:K or interleave:K,resident=S (K >= 1, 0 <= S <= 1), "
    "stream";

template <class T>
std::optional<T> number(std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

double share(std::string_view whole, std::string_view text) {
  const std::optional<double> value = number<double>(text);
  if (!value || !(*value >= 0.0 && *value <= 1.0)) {
    throw UsageError(fmt::format("policy '{}'", whole), fmt::format("'{}' is not a share between 0 and 1", text),
                     fmt::format("use {}", forms));
  }
  return *value;
}

Policy of_kind(Policy::Kind kind) {
  Policy policy;
  policy.kind = kind;
  return policy;
}

Policy parse_interleave(std::string_view whole, std::string_view rest) {
  Policy policy = of_kind(Policy::Kind::interleave);
  const std::size_t comma = rest.find(',');
  const std::string_view stride = rest.substr(0, comma);
  const std::optional<std::int64_t> value = number<std::int64_t>(stride);
  if (!value || *value < 1) {
    throw UsageError(fmt::format("policy '{}'", whole), fmt::format("the stride '{}' is not a number >= 1", stride),
                     fmt::format("use {}", forms));
  }
  policy.stride = *value;
  if (comma == std::string_view::npos) return policy;
  constexpr std::string_view key = "resident=";
  const std::string_view option = rest.substr(comma + 1);
  if (!option.starts_with(key)) {
    throw UsageError(fmt::format("policy '{}'", whole), fmt::format("'{}' is not known", option),
                     fmt::format("use {}", forms));
  }
  policy.resident_share = share(whole, option.substr(key.size()));
  return policy;
}

}  // namespace

Policy parse_policy(std::string_view text) {
  if (text == "auto") return of_kind(Policy::Kind::automatic);
  if (text == "device") return of_kind(Policy::Kind::device);
  if (text == "host") return of_kind(Policy::Kind::host);
  if (text == "stream") return of_kind(Policy::Kind::stream);
  if (text.starts_with("static:")) {
    Policy policy = of_kind(Policy::Kind::static_share);
    policy.host_share = share(text, text.substr(7));
    return policy;
  }
  if (text.starts_with("interleave:")) return parse_interleave(text, text.substr(11));
  throw UsageError(fmt::format("policy '{}' is not known", text), {}, fmt::format("use {}", forms));
}

void Policy::check() const {
  const auto is_share = [](double value) { return value >= 0.0 && value <= 1.0; };
  if (stride >= 1 && is_share(host_share) && is_share(resident_share)) return;
  throw UsageError(
      fmt::format("policy of stride {}, host share {}, resident share {}", stride, host_share, resident_share),
      "a stride is at least 1, a share between 0 and 1");
}

std::string Policy::text() const {
  switch (kind) {
    case Kind::automatic:
      return "auto";
    case Kind::device:
      return "device";
    case Kind::host:
      return "host";
    case Kind::stream:
      return "stream";
    case Kind::static_share:
      return fmt::format("static:{}", host_share);
    case Kind::interleave:
      return resident_share > 0.0 ? fmt::format("interleave:{},resident={}", stride, resident_share)
                                  : fmt::format("interleave:{}", stride);
  }
  return "unknown";
}

}  // namespace tandem
