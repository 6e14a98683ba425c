#pragma once
// The subcommands. Each adds itself to the program; `run` is called after parsing and returns the exit code.
#include <CLI/CLI.hpp>
#include <functional>
#include <string>

namespace tandem {

/// Facts about the program's call that subcommands use beside their own flags.
struct ProgramContext {
  std::string program;  ///< the program as it was called, a word for a shell
  std::string command_line;
};

using CommandFunction = std::function<int(const ProgramContext&)>;

CommandFunction add_train_command(CLI::App& program);
CommandFunction add_plan_command(CLI::App& program);
CommandFunction add_calibrate_command(CLI::App& program);
CommandFunction add_bench_command(CLI::App& program);
CommandFunction add_eval_command(CLI::App& program);
CommandFunction add_score_command(CLI::App& program);
CommandFunction add_sample_command(CLI::App& program);
CommandFunction add_digest_command(CLI::App& program);
CommandFunction add_export_command(CLI::App& program);
CommandFunction add_report_command(CLI::App& program);
CommandFunction add_launch_command(CLI::App& program);

/// Prints to standard output. Throws WriteError where nobody takes it.
void print_output(const std::string& text);

}  // namespace tandem
