#pragma once
// Texts about the program itself, made of its own definitions of options: completion for shells, and the man page.
#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "cli/common/commands.hpp"

namespace tandem {

struct DescribedFlag {
  std::vector<std::string> names;  ///< "--clip", "--grad-clip"; of a positional argument its one name, without dashes
  std::string unit;                ///< "BYTES"; empty: it takes no value
  bool may_lack_value = false;
  bool takes_files = false;
  std::vector<std::string> words;  ///< values that are known
  std::string help;
};

struct DescribedCommand {
  std::string name;
  std::string help;
  std::string example;  ///< last line of its help
  std::vector<DescribedFlag> flags;
  std::vector<DescribedFlag> arguments;
};

struct DescribedProgram {
  std::string help;
  std::vector<DescribedFlag> flags;
  std::vector<DescribedCommand> commands;
};

/// All that `--help` shows, hidden subcommands and options left out.
DescribedProgram describe(const CLI::App& program);

std::string bash_completion(const DescribedProgram& program);
std::string zsh_completion(const DescribedProgram& program);
std::string fish_completion(const DescribedProgram& program);
/// Manual page, in the language of man.
std::string man_page(const DescribedProgram& program);

/// Adds the hidden subcommand that prints these texts. `program` must outlive what is returned.
CommandFunction add_completion_command(CLI::App& program);

}  // namespace tandem
