#include "cli/common/flags.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "core/base/error.hpp"

namespace tandem {

void ConfigFlags::add_to(CLI::App& command, const std::vector<std::string_view>& names,
                         const std::vector<std::string_view>& swept) {
  const auto is_in = [](const std::vector<std::string_view>& list, std::string_view name) {
    return std::find(list.begin(), list.end(), name) != list.end();
  };
  for (const ConfigField& field : config_fields()) {
    if (!names.empty() && !is_in(names, field.name)) continue;
    const std::string name(field.name);
    const std::string flag = name == "clip" ? "--clip,--grad-clip" : "--" + name;
    std::string help = fmt::format("{}. Default: {}", field.help, field.fallback);
    if (!field.example.empty()) help += fmt::format(". Example: --{} {}", name, field.example);
    if (field.kind == ConfigField::Kind::boolean) {
      Switch& typed = switches_[name];
      command.add_flag(flag, typed.on, fmt::format("{}. --no-{} takes it back", help, name));
      command.add_flag("--no-" + name, typed.off)->group("");  // undoes an earlier setting, of a run or a file
      continue;
    }
    const bool sweeps = is_in(swept, field.name);
    auto* option = command.add_option(flag, values_[name], help + (sweeps ? " (several: each in turn)" : ""));
    option->type_name(std::string(field.unit) + (sweeps ? " ..." : ""));
    if (sweeps || field.kind == ConfigField::Kind::list)
      option->expected(1, CLI::detail::expected_max_vector_size);
    else
      // Unless told, an option that is kept in a vector takes what follows its value, too.
      option->expected(1)->allow_extra_args(false)->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  }
  command
      .add_option("--config", config_file_,
                  "configuration in TOML with the same names; flags win. Example: --config run.toml")
      ->type_name("FILE");
}

bool ConfigFlags::given(std::string_view name) const {
  const auto found = values_.find(name);
  return found != values_.end() && !found->second.empty();
}

std::vector<std::string> ConfigFlags::values(std::string_view name) const {
  const auto found = values_.find(name);
  return found == values_.end() ? std::vector<std::string>() : found->second;
}

std::string ConfigFlags::out() const { return given("out") ? values_.find("out")->second.back() : std::string(); }

TrainConfig ConfigFlags::config(const std::string& base) const {
  TrainConfig config;
  if (!config_file_.empty()) {
    read_config_toml(config_file_, config);
  } else if (!base.empty() && std::filesystem::exists(base)) {
    read_config_toml(base, config);
  }
  if (given("data")) config.mix.clear();
  if (given("mix")) config.data.clear();
  if (given("steps")) config.epochs = 0.0;
  if (given("epochs")) config.steps = 0;
  for (const ConfigField& field : config_fields()) {
    const auto typed = values_.find(field.name);
    if (typed != values_.end() && !typed->second.empty()) {
      const bool list = field.kind == ConfigField::Kind::list;
      set_config_field(config, field, list ? typed->second : std::vector{typed->second.front()});
    }
    const auto flipped = switches_.find(field.name);
    if (flipped == switches_.end()) continue;
    const auto [on, off] = flipped->second;
    if (on && off) throw UsageError(fmt::format("--{}", field.name), fmt::format("--no-{} is given too", field.name));
    if (on || off) field.set(config, on ? "true" : "false");
  }
  if (given("lr") && !given("min-lr")) config.min_lr.reset();  // a tenth of the new one
  return config;
}

}  // namespace tandem
