// Completion for bash, zsh and fish.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string>
#include <string_view>

#include "cli/program/program_texts.hpp"

namespace tandem {
namespace {

/// The help of a flag up to its default, on one line.
std::string brief(const std::string& help) { return help.substr(0, help.find(". ")); }

/// `text` with a backslash before each of the characters.
std::string escaped_before(std::string_view text, std::string_view characters) {
  std::string result;
  for (const char c : text) {
    if (characters.find(c) != characters.npos) result += '\\';
    result += c;
  }
  return result;
}

/// A text between single quotes of a shell.
std::string in_quotes(std::string_view text) {
  std::string result = "'";
  for (const char c : text) result += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return result + "'";
}

std::string names_of(const std::vector<DescribedFlag>& flags) {
  std::string names;
  for (const DescribedFlag& flag : flags)
    names += fmt::format("{}{}", names.empty() ? "" : " ", fmt::join(flag.names, " "));
  return names;
}

/// The case of bash that completes a flag's value; empty where it takes none.
std::string bash_value(const std::string& command, const DescribedFlag& flag) {
  if (flag.unit.empty()) return {};
  std::string patterns;
  for (const std::string& name : flag.names)
    patterns += fmt::format("{}{}:{}", patterns.empty() ? "" : "|", command, name);
  std::string text = fmt::format("    {})\n", patterns);
  if (flag.takes_files) text += "      compopt -o filenames\n      COMPREPLY+=($(compgen -f -- \"$cur\"))\n";
  if (!flag.words.empty())
    text += fmt::format("      COMPREPLY+=($(compgen -W {} -- \"$cur\"))\n",
                        in_quotes(fmt::format("{}", fmt::join(flag.words, " "))));
  return text + (flag.may_lack_value ? "      [[ $cur == -* ]] || return ;;\n" : "      return ;;\n");
}

/// "[help]:UNIT:action" of zsh's _arguments.
std::string zsh_value(const DescribedFlag& flag) {
  if (flag.unit.empty()) return {};
  std::string action = " ";
  if (!flag.words.empty()) action = fmt::format("({})", fmt::join(flag.words, " "));
  if (flag.takes_files)
    action = flag.words.empty() ? "_files" : fmt::format("{{compadd {}; _files}}", fmt::join(flag.words, " "));
  return fmt::format("{}{}:{}", flag.may_lack_value ? "::" : ":", escaped_before(flag.unit, ":[]"), action);
}

std::string zsh_flags(const std::vector<DescribedFlag>& flags) {
  std::string text;
  for (const DescribedFlag& flag : flags) {
    for (const std::string& name : flag.names) {
      text += fmt::format(
          " \\\n        {}",
          in_quotes(fmt::format("*{}[{}]{}", name, escaped_before(brief(flag.help), "[]:\\"), zsh_value(flag))));
    }
  }
  return text;
}

std::string fish_flag(const std::string& condition, const DescribedFlag& flag) {
  std::string text;
  for (const std::string& name : flag.names) {
    const bool is_long = name.starts_with("--");
    text += fmt::format("complete -c tandem -n {} {} {}", in_quotes(condition), is_long ? "-l" : "-s",
                        name.substr(is_long ? 2 : 1));
    if (!flag.unit.empty()) text += flag.takes_files ? " -r -F" : " -x";
    if (!flag.words.empty()) text += fmt::format(" -a '{}'", fmt::join(flag.words, " "));
    text += fmt::format(" -d '{}'\n", escaped_before(brief(flag.help), "'\\"));
  }
  return text;
}

}  // namespace

std::string bash_completion(const DescribedProgram& program) {
  std::string commands, values, words;
  for (const DescribedFlag& flag : program.flags) values += bash_value("*", flag);
  for (const DescribedCommand& command : program.commands) {
    commands += fmt::format("{}{}", commands.empty() ? "" : " ", command.name);
    for (const DescribedFlag& flag : command.flags) values += bash_value(command.name, flag);
    words += fmt::format("    {}) words={} ;;\n", command.name, in_quotes(names_of(command.flags)));
  }
  std::string any = commands;
  for (char& c : any) c = c == ' ' ? '|' : c;
  return fmt::format(R"bash(# Completion of tandem for bash, made by the program itself.
_tandem() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} command='' word words
  COMPREPLY=()
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case $word in
      {}) command=$word; break ;;
    esac
  done
  case $command:$prev in
{}  esac
  case $command in
    '') words={} ;;
{}  esac
  if [[ $cur == -* || -z $command ]]; then
    COMPREPLY+=($(compgen -W "$words" -- "$cur"))
  else
    compopt -o filenames
    COMPREPLY+=($(compgen -f -- "$cur"))
  fi
}}
complete -F _tandem tandem
)bash",
                     any, values, in_quotes(commands + " " + names_of(program.flags)), words);
}

std::string zsh_completion(const DescribedProgram& program) {
  std::string commands, cases;
  for (const DescribedCommand& command : program.commands) {
    commands += fmt::format("    {}\n", in_quotes(command.name + ":" + escaped_before(command.help, ":\\")));
    cases += fmt::format("    {})\n      _arguments{} \\\n        '*:file:_files' ;;\n", command.name,
                         zsh_flags(command.flags));
  }
  return fmt::format(R"zsh(#compdef tandem
# Completion of tandem for zsh, made by the program itself.
_tandem() {{
  local -a commands
  commands=(
{}  )
  if (( CURRENT == 2 )); then
    _describe command commands
    _arguments{}
    return
  fi
  local command=${{words[2]}}
  shift words
  (( CURRENT-- ))
  case $command in
{}  esac
}}
_tandem "$@"
)zsh",
                     commands, zsh_flags(program.flags), cases);
}

std::string fish_completion(const DescribedProgram& program) {
  std::string text = "# Completion of tandem for fish, made by the program itself.\n";
  for (const DescribedFlag& flag : program.flags) text += fish_flag("__fish_use_subcommand", flag);
  for (const DescribedCommand& command : program.commands) {
    text += fmt::format("complete -c tandem -n __fish_use_subcommand -f -a {} -d '{}'\n", command.name,
                        escaped_before(command.help, "'\\"));
  }
  for (const DescribedCommand& command : program.commands) {
    for (const DescribedFlag& flag : command.flags)
      text += fish_flag("__fish_seen_subcommand_from " + command.name, flag);
  }
  return text;
}

}  // namespace tandem
