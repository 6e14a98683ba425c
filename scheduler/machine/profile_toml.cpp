// Machine profiles as commented TOML.
#include <fmt/format.h>
#include <toml++/toml.h>

#include <algorithm>
#include <array>
#include <sstream>

#include "core/base/error.hpp"
#include "core/base/mapped_file.hpp"
#include "core/base/toml_text.hpp"
#include "scheduler/machine/profile.hpp"

namespace tandem {
namespace {

struct TextField {
  std::string_view key;
  std::string MachineProfile::*text;
};
constexpr std::array text_fields{TextField{"name", &MachineProfile::name},
                                 TextField{"cpu_name", &MachineProfile::cpu},
                                 TextField{"device_kind", &MachineProfile::device_kind},
                                 TextField{"device_name", &MachineProfile::device},
                                 TextField{"driver", &MachineProfile::driver},
                                 TextField{"version", &MachineProfile::version}};

struct ThreadField {
  std::string_view key;
  double ThreadFigures::*value;
};
constexpr std::array thread_fields{ThreadField{"dram_copy", &ThreadFigures::dram_copy},
                                   ThreadField{"dram_read", &ThreadFigures::dram_read},
                                   ThreadField{"cpu_update", &ThreadFigures::cpu_update},
                                   ThreadField{"cpu_update_with_copies", &ThreadFigures::cpu_update_with_copies}};

constexpr double most_threads = 4096;

std::string toml_text(std::string_view text) {
  std::ostringstream out;
  out << toml::value<std::string>(std::string(text));
  return out.str();
}

/// TOML wants a point or an exponent in a float; both read back as the same number.
std::string number(double value) { return fmt::format("{}", value); }

std::string what_of(std::string_view origin, std::string_view key) {
  return fmt::format("profile {}: {}", origin, key);
}

double number_of(const toml::node& node, std::string_view origin, std::string_view key) {
  if (const auto value = node.value<double>()) return *value;
  throw UsageError(what_of(origin, key), "it is not a number", "write for example 55.2e9");
}

class Reader {
 public:
  Reader(const toml::table& root, std::string_view origin) : root_(root), origin_(origin) {}

  MachineProfile read() {
    for (const auto& [key, node] : root_) {
      const std::string_view name = key.str();
      if (const auto* text = find_text(name)) {
        const auto value = node.value<std::string>();
        if (!value) throw UsageError(what_of(origin_, name), "it is not a text", "put it in quotes");
        profile_.*(text->text) = *value;
      } else if (name == "threads" && node.is_array()) {
        read_threads(*node.as_array());
      } else if (node.is_table()) {
        read_section(name, *node.as_table());
      } else {
        throw UsageError(what_of(origin_, name), "it is not known", "see docs/performance-model.md");
      }
    }
    return std::move(profile_);
  }

 private:
  static const TextField* find_text(std::string_view key) {
    const auto found = std::find_if(text_fields.begin(), text_fields.end(), [&](auto& f) { return f.key == key; });
    return found == text_fields.end() ? nullptr : &*found;
  }

  void read_section(std::string_view section, const toml::table& table) {
    for (const auto& [key, node] : table) {
      const std::string_view name = key.str();
      const std::string full = fmt::format("{}.{}", section, name);
      const auto& fields = profile_fields();
      const auto field = std::find_if(fields.begin(), fields.end(),
                                      [&](const ProfileField& f) { return f.section == section && f.key == name; });
      if (field == fields.end())
        throw UsageError(what_of(origin_, full), "it is not known", "see docs/performance-model.md");
      profile_.*(field->figure) = read_figure(node, *field, full);
    }
  }

  Figure read_figure(const toml::node& node, const ProfileField& field, const std::string& full) const {
    const toml::table* table = node.as_table();
    if (table == nullptr) return {number_of(node, origin_, full), 0.0, {}};
    Figure figure;
    bool has_value = false;
    for (const auto& [key, entry] : *table) {
      const std::string_view name = key.str();
      if (name == "value") {
        figure.value = number_of(entry, origin_, full);
        has_value = true;
      } else if (name == "spread") {
        figure.spread = number_of(entry, origin_, full + ".spread");
      } else if (name == "source") {
        figure.source = entry.value_or(std::string());
      } else if (name == "unit") {
        const auto unit = entry.value_or(std::string());
        if (unit != field.unit) {
          throw UsageError(what_of(origin_, full), fmt::format("its unit is '{}'", unit),
                           fmt::format("give it in {}", field.unit));
        }
      } else {
        throw UsageError(what_of(origin_, fmt::format("{}.{}", full, name)), "it is not known",
                         "use value, unit, spread, source");
      }
    }
    if (!has_value)
      throw UsageError(what_of(origin_, full), "it has no value", "write { value = ..., unit = \"...\" }");
    return figure;
  }

  void read_threads(const toml::array& array) {
    for (const toml::node& node : array) {
      const toml::table* table = node.as_table();
      if (table == nullptr)
        throw UsageError(what_of(origin_, "threads"), "it is not a list of tables", "write [[threads]]");
      ThreadFigures& row = profile_.by_threads.emplace_back();
      for (const auto& [key, entry] : *table) {
        const std::string_view name = key.str();
        const std::string full = fmt::format("threads.{}", name);
        const double value = number_of(entry, origin_, full);
        if (!(value >= 0.0 && value < 1e15)) throw UsageError(what_of(origin_, full), "it is negative or absurd");
        const auto field =
            std::find_if(thread_fields.begin(), thread_fields.end(), [&](auto& f) { return f.key == name; });
        if (name == "count") {
          if (value > most_threads) throw UsageError(what_of(origin_, full), "no machine has as many", "up to 4096");
          row.threads = static_cast<int>(value);
        } else if (field != thread_fields.end()) {
          row.*(field->value) = value;
        } else {
          throw UsageError(what_of(origin_, full), "it is not known");
        }
      }
    }
  }

  const toml::table& root_;
  std::string_view origin_;
  MachineProfile profile_;
};

}  // namespace

std::string profile_toml(const MachineProfile& profile) {
  std::string text =
      "# Machine profile of tandem. Each figure is a median; spread is (largest - smallest) / median of its samples, "
      "of many\n"
      "# without a tenth at each end.\n"
      "# Figures of [device] and [link] are of one device, the others of the whole host, which all devices share.\n";
  for (const TextField& field : text_fields)
    text += fmt::format("{} = {}\n", field.key, toml_text(profile.*(field.text)));
  std::string_view section;
  for (const ProfileField& field : profile_fields()) {
    const Figure& figure = profile.*(field.figure);
    if (!field.required && figure.value == 0.0 && figure.source.empty()) continue;
    if (field.section != section) text += fmt::format("\n[{}]\n", field.section);
    section = field.section;
    text += fmt::format("# {}\n{} = {{ value = {}, unit = {}", field.help, field.key, number(figure.value),
                        toml_text(field.unit));
    if (figure.spread > 0.0) text += fmt::format(", spread = {}", number(figure.spread));
    if (!figure.source.empty()) text += fmt::format(", source = {}", toml_text(figure.source));
    text += " }\n";
  }
  for (const ThreadFigures& row : profile.by_threads) {
    text += fmt::format("\n[[threads]]  # B/s and parameters/s\ncount = {}\n", row.threads);
    for (const ThreadField& field : thread_fields) {
      if (row.*(field.value) > 0.0) text += fmt::format("{} = {}\n", field.key, number(row.*(field.value)));
    }
  }
  return text;
}

MachineProfile parse_profile(std::string_view toml, std::string_view origin) {
  toml::table root;
  try {
    root = toml::parse(toml_in_ascii(toml, fmt::format("profile {}", origin)));
  } catch (const toml::parse_error& error) {
    throw UsageError(fmt::format("profile {}, line {}", origin, error.source().begin.line),
                     std::string(error.description()), "see profiles/ for examples");
  }
  MachineProfile profile = Reader(root, origin).read();
  if (profile.name.empty()) profile.name = origin;
  profile.check();
  return profile;
}

MachineProfile read_profile(const std::filesystem::path& file) {
  const MappedFile mapped(file);
  return parse_profile({reinterpret_cast<const char*>(mapped.bytes().data()), mapped.bytes().size()}, file.string());
}

}  // namespace tandem
