#pragma once
// Words of `tandem launch`, of which those behind the command belong to the command.
#include <string>
#include <vector>

namespace tandem {

/// Command line, behind the program's name, with `--` in front of the command of `launch` where it was left out. Other
/// command lines stay as they are.
std::vector<std::string> with_command_marked(std::vector<std::string> words);

}  // namespace tandem
