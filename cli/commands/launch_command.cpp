// tandem launch
#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "cli/commands/child_processes.hpp"
#include "cli/common/commands.hpp"
#include "comm/proof.hpp"
#include "core/base/error.hpp"

namespace tandem {
namespace {

struct LaunchFlags {
  int processes = 0;
  std::vector<std::string> command;
};

/// A port of the loopback address that nobody has at the moment.
int free_port() {
  const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  const bool found = socket >= 0 && ::bind(socket, reinterpret_cast<const sockaddr*>(&address), size) == 0 &&
                     ::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size) == 0;
  if (socket >= 0) ::close(socket);
  if (found) return ntohs(address.sin_port);
  throw DeviceError("launch", "this machine has no port left on its loopback address", "end what holds them");
}

std::string new_secret() {
  std::string text;
  for (const char byte : random_nonce()) text += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  return text;
}

/// The program that runs now, whatever called it.
std::filesystem::path own_program() {
  std::error_code error;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error);
  if (!error) return program;
  throw DeviceError("launch", fmt::format("cannot tell where the program lies: {}", error.message()), "mount /proc");
}

int launch(const LaunchFlags& flags, const ProgramContext& context) {
  constexpr const char* example = "for example tandem launch --processes 2 -- train --model tiny-gpt2 ...";
  if (flags.processes < 1) throw UsageError("--processes", "missing", example);
  if (flags.command.empty()) throw UsageError("launch", "there is no command", example);
  if (flags.command.front() != "train") {
    throw UsageError(fmt::format("launch: '{}'", flags.command.front()), "only train works across processes", example);
  }
  ChildCommand command{.program = own_program(), .arguments = {context.program}, .environment = {}};
  command.arguments.insert(command.arguments.end(), flags.command.begin(), flags.command.end());
  const std::string port = std::to_string(free_port()), secret = new_secret();
  ChildProcesses children;
  for (int rank = 0; rank < flags.processes; ++rank) {
    command.environment = {{"RANK", std::to_string(rank)},
                           {"LOCAL_RANK", std::to_string(rank)},
                           {"WORLD_SIZE", std::to_string(flags.processes)},
                           {"LOCAL_WORLD_SIZE", std::to_string(flags.processes)},
                           {"MASTER_ADDR", "127.0.0.1"},
                           {"MASTER_PORT", port},
                           {"TANDEM_TOKEN", secret},
                           {"TORCHELASTIC_USE_AGENT_STORE", ""}};
    children.start(command);
  }
  return children.run();
}

}  // namespace

CommandFunction add_launch_command(CLI::App& program) {
  auto* command = program.add_subcommand("launch", "trains in several processes of this machine, which end together");
  auto flags = std::make_shared<LaunchFlags>();
  command
      ->add_option("--processes", flags->processes,
                   "processes to start, each with one device. Lines begin with the number of the process")
      ->type_name("NUMBER")
      ->check(CLI::Range(1, 1024));
  command
      ->add_option("command", flags->command,
                   "what each runs: train and its flags. The -- in front of it may be left out")
      ->type_name("COMMAND");
  command->footer(
      "Example: tandem launch --processes 2 -- train --model tiny-gpt2 --data corpus/ --steps 200 --grad-accum 2 --out "
      "runs/first");
  return [flags](const ProgramContext& context) { return launch(*flags, context); };
}

}  // namespace tandem
