#pragma once
// Kinds of configuration fields: how each parses its text, checks it, and prints it again.
#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <type_traits>

#include "core/base/error.hpp"
#include "train/config/config.hpp"
#include "train/config/units.hpp"

namespace tandem::fields {

using Kind = ConfigField::Kind;

inline constexpr double unlimited = std::numeric_limits<double>::max();

[[noreturn]] inline void out_of_range(std::string_view text, std::string_view range) {
  throw UsageError(fmt::format("'{}'", text), "out of range", fmt::format("use {}", range));
}

struct Words {
  std::string_view name, unit, fallback, example, help;
};

inline ConfigField field(const Words& w, Kind kind, std::function<void(TrainConfig&, std::string_view)> set,
                         std::function<std::vector<std::string>(const TrainConfig&)> get) {
  return {w.name, kind, w.unit, w.fallback, w.example, w.help, std::move(set), std::move(get)};
}

inline ConfigField text(const Words& w, std::string TrainConfig::*member) {
  return field(
      w, Kind::text,
      [member](TrainConfig& c, std::string_view value) {
        if (value.empty()) out_of_range(value, "a text that is not empty");
        c.*member = value;
      },
      [member](const TrainConfig& c) {
        return (c.*member).empty() ? std::vector<std::string>{} : std::vector{c.*member};
      });
}

inline ConfigField list(const Words& w, std::vector<std::string> TrainConfig::*member) {
  return field(
      w, Kind::list,
      [member](TrainConfig& c, std::string_view value) {
        if (value.empty()) out_of_range(value, "a path");
        (c.*member).emplace_back(value);
      },
      [member](const TrainConfig& c) { return c.*member; });
}

inline ConfigField flag(const Words& w, bool TrainConfig::*member) {
  return field(
      w, Kind::boolean,
      [member](TrainConfig& c, std::string_view value) {
        if (value != "true" && value != "false") out_of_range(value, "true or false");
        c.*member = value == "true";
      },
      [member](const TrainConfig& c) { return std::vector<std::string>{c.*member ? "true" : "false"}; });
}

/// A whole number in [least, most]; `unset` is a value that is not printed.
template <class T>
ConfigField integer(const Words& w, T TrainConfig::*member, std::int64_t least, std::int64_t most,
                    std::optional<T> unset = std::nullopt) {
  return field(
      w, Kind::number,
      [=](TrainConfig& c, std::string_view value) {
        const std::int64_t number = parse_integer(value);
        if (number < least || number > most) out_of_range(value, fmt::format("{} to {}", least, most));
        c.*member = static_cast<T>(number);
      },
      [=](const TrainConfig& c) {
        if (unset && c.*member == *unset) return std::vector<std::string>{};
        return std::vector{std::to_string(c.*member)};
      });
}

/// A number in [least, most), or (least, most) where `open`.
template <class T>
ConfigField number(const Words& w, T TrainConfig::*member, double least, double most, bool open = false) {
  return field(
      w, Kind::number,
      [=](TrainConfig& c, std::string_view value) {
        const double x = parse_number(value);
        if (x < least || (open && x == least) || x >= most) {
          out_of_range(value, most == unlimited ? fmt::format("a number {} {}", open ? "above" : "of at least", least)
                                                : fmt::format("a number from {} to below {}", least, most));
        }
        // The updates take them so: an eps of 1e-46 would be none, and 0 / 0 follows where no gradient is.
        const auto held = static_cast<float>(x);
        if (!std::isfinite(held) || (open && held <= least)) out_of_range(value, "a number within the range of fp32");
        c.*member = x;
      },
      [=](const TrainConfig& c) {
        if constexpr (std::is_same_v<T, double>) {
          return std::vector{print_number(c.*member)};
        } else {
          return c.*member ? std::vector{print_number(*(c.*member))} : std::vector<std::string>{};
        }
      });
}

/// Parsed and printed by functions; `shown` says when it is set at all.
template <class T, class Parse, class Print, class Shown>
ConfigField other(const Words& w, T TrainConfig::*member, Parse parse, Print print, Shown shown) {
  return field(
      w, Kind::text, [=](TrainConfig& c, std::string_view value) { c.*member = parse(value); },
      [=](const TrainConfig& c) {
        return shown(c.*member) ? std::vector{std::string(print(c.*member))} : std::vector<std::string>{};
      });
}

/// A few words and what they mean.
template <class T>
struct Vocabulary {
  std::vector<std::pair<std::string_view, T>> words;

  T parse(std::string_view value) const {
    std::string known;
    for (const auto& [word, meaning] : words) {
      if (word == value) return meaning;
      known += fmt::format("{}{}", known.empty() ? "" : ", ", word);
    }
    throw UsageError(fmt::format("'{}'", value), "not supported", fmt::format("use {}", known));
  }
  std::string_view print(T value) const {
    const auto found = std::ranges::find(words, value, &std::pair<std::string_view, T>::second);
    return found != words.end() ? found->first : throw MisuseError("a choice without a word");
  }
};

/// One of a few words.
template <class T>
ConfigField choice(const Words& w, T TrainConfig::*member, std::vector<std::pair<std::string_view, T>> words) {
  const Vocabulary<T> all{std::move(words)};
  return other(
      w, member, [all](std::string_view value) { return all.parse(value); },
      [all](T value) { return all.print(value); }, [](T) { return true; });
}

/// One of a few words, or none.
template <class T>
ConfigField choice(const Words& w, std::optional<T> TrainConfig::*member,
                   std::vector<std::pair<std::string_view, T>> words) {
  const Vocabulary<T> all{std::move(words)};
  return other(
      w, member, [all](std::string_view value) { return std::optional(all.parse(value)); },
      [all](std::optional<T> value) { return all.print(*value); },
      [](std::optional<T> value) { return value.has_value(); });
}

inline constexpr auto positive = [](auto value) { return value > 0; };
inline constexpr auto always = [](const auto&) { return true; };

/// Appends the fields of adapters and of the base below them.
void add_adapter_fields(std::vector<ConfigField>& all);

}  // namespace tandem::fields
