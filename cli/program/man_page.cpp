// The man page.
#include <fmt/format.h>

#include <string>
#include <string_view>

#include "cli/program/program_texts.hpp"
#include "core/base/version.hpp"

namespace tandem {
namespace {

/// Text as roff has it: hyphens stay, and no line begins a request.
std::string roff(std::string_view text) {
  std::string result;
  for (const char c : text) {
    if (c == '\\')
      result += "\\e";
    else if (c == '-')
      result += "\\-";
    else if (c == '\'')
      result += "\\(aq";
    else
      result += c;
  }
  return result.starts_with('.') ? "\\&" + result : result;
}

std::string entry(const DescribedFlag& flag) {
  std::string names;
  for (const std::string& name : flag.names)
    names += fmt::format("{}\\fB{}\\fR", names.empty() ? "" : ", ", roff(name));
  const std::string unit = flag.unit.empty() ? "" : fmt::format(" \\fI{}\\fR", roff(flag.unit));
  return fmt::format(".TP\n{}{}\n{}\n", names, unit, roff(flag.help));
}

std::string section(const DescribedCommand& command) {
  std::string text = fmt::format(".SS {}\n{}.\n", command.name, roff(command.help));
  for (const DescribedFlag& argument : command.arguments) text += entry(argument);
  for (const DescribedFlag& flag : command.flags) text += entry(flag);
  return command.example.empty() ? text : text + fmt::format(".PP\n{}\n", roff(command.example));
}

}  // namespace

std::string man_page(const DescribedProgram& program) {
  std::string text = fmt::format(
      ".TH TANDEM 1 \"\" \"tandem {}\" \"User Commands\"\n.SH NAME\ntandem \\- trains language models that do not fit "
      "on "
      "their GPU\n.SH SYNOPSIS\n.B tandem\n\\fISUBCOMMAND\\fR [\\fIOPTIONS\\fR]\n.SH DESCRIPTION\n{}\n",
      version, roff(program.help));
  for (const DescribedCommand& command : program.commands) {
    text += fmt::format(".TP\n.B {}\n{}\n", command.name, roff(command.help));
  }
  text += ".SH OPTIONS\n";
  for (const DescribedFlag& flag : program.flags) text += entry(flag);
  text += ".SH SUBCOMMANDS\n";
  for (const DescribedCommand& command : program.commands) text += section(command);
  return text +
         ".SH EXIT STATUS\n0: done; 1: a fault of tandem; 2: bad flag, configuration or model description; 3: the plan "
         "does "
         "not fit; 4: unreadable or mismatched tensors, data or checkpoint; 5: device or communication failure; 6: "
         "training "
         "cannot go on; 7: cannot write; 128+n: ended by signal n.\n";
}

}  // namespace tandem
