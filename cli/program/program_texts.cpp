#include "cli/program/program_texts.hpp"

#include <algorithm>
#include <memory>
#include <utility>

#include "cli/common/shipped_profiles.hpp"
#include "core/base/version.hpp"
#include "models/config/config.hpp"

namespace tandem {
namespace {

/// Values in a type such as "TYPE:{bf16,fp32}", which a check adds to it.
std::vector<std::string> words_of(const std::string& type) {
  std::vector<std::string> words;
  const std::size_t open = type.find('{'), close = type.find('}');
  if (open == std::string::npos || close == std::string::npos) return words;
  for (std::size_t at = open + 1; at <= close;) {
    const std::size_t end = std::min(type.find(',', at), close);
    words.push_back(type.substr(at, end - at));
    at = end + 1;
  }
  return words;
}

/// Values that are known by name, of options that take others too.
std::vector<std::string> names_for(const std::string& option) {
  if (option == "--model") return builtin_models();
  std::vector<std::string> names;
  if (option == "--profile") {
    for (const ShippedProfile& profile : shipped_profiles()) names.emplace_back(profile.name);
  }
  return names;
}

bool takes_files(const std::string& option, const std::string& unit) {
  for (const char* kind : {"FILE", "DIR", "PATH"}) {
    if (unit.find(kind) != std::string::npos) return true;
  }
  return option == "--model";
}

DescribedFlag described(const CLI::Option& option) {
  DescribedFlag flag;
  for (const std::string& name : option.get_snames()) flag.names.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) flag.names.push_back("--" + name);
  if (option.get_positional()) flag.names = {option.get_name(true)};
  flag.help = option.get_description();
  if (option.get_type_size() == 0) return flag;
  const std::string type = option.get_type_name();
  flag.unit = type.substr(0, type.find(':'));
  flag.may_lack_value = option.get_expected_min() == 0;
  flag.words = words_of(type);
  if (flag.words.empty()) flag.words = names_for(flag.names.back());
  flag.takes_files = takes_files(flag.names.back(), flag.unit);
  return flag;
}

std::vector<DescribedFlag> options_of(const CLI::App& app, bool positional) {
  std::vector<DescribedFlag> flags;
  const auto is_wanted = [&](const CLI::Option* option) {
    return option->get_positional() == positional && !option->get_group().empty();
  };
  for (const CLI::Option* option : app.get_options(is_wanted)) flags.push_back(described(*option));
  return flags;
}

int print_text(const CLI::App& program, const std::string& kind) {
  const DescribedProgram described = describe(program);
  if (kind == "bash") print_output(bash_completion(described));
  if (kind == "zsh") print_output(zsh_completion(described));
  if (kind == "fish") print_output(fish_completion(described));
  if (kind == "man") print_output(man_page(described));
  return 0;
}

}  // namespace

DescribedProgram describe(const CLI::App& program) {
  DescribedProgram described{program.get_description(), options_of(program, false), {}};
  const auto is_shown = [](const CLI::App* app) { return !app->get_group().empty(); };
  for (const CLI::App* command : program.get_subcommands(is_shown)) {
    described.commands.push_back({command->get_name(), command->get_description(), command->get_footer(),
                                  options_of(*command, false), options_of(*command, true)});
  }
  return described;
}

CommandFunction add_completion_command(CLI::App& program) {
  auto* command = program.add_subcommand("completion", "prints completion for a shell, or the man page");
  command->group("");
  auto kind = std::make_shared<std::string>();
  command->add_option("kind", *kind, "bash, zsh, fish or man")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh", "fish", "man"}));
  return [&program, kind](const ProgramContext&) { return print_text(program, *kind); };
}

}  // namespace tandem
