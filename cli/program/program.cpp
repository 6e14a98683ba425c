#include "cli/program/program.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <malloc.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include "cli/common/commands.hpp"
#include "cli/common/launch_environment.hpp"
#include "cli/common/launch_words.hpp"
#include "cli/program/program_texts.hpp"
#include "core/base/error.hpp"
#include "core/base/stall.hpp"
#include "core/base/utf8.hpp"
#include "core/base/version.hpp"
#include "core/host/isa.hpp"
#include "models/config/config.hpp"
#include "train/report/next_commands.hpp"
#include "train/report/progress.hpp"
#include "train/runtime/end_stalled.hpp"

namespace tandem {
namespace {

int report(std::string_view text, ExitCode code) {
  std::string line(text);
  for (char& c : line) {
    if (c == '\n' || c == '\r') c = ' ';
  }
  std::fflush(stdout);
  std::fputs(fmt::format("tandem: error: {}\n", line).c_str(), stderr);
  return static_cast<int>(code);
}

int report_fault(std::string_view what) {
  return report(
      fmt::format("a fault of tandem itself: {}; please report this line, the command and `tandem --version`", what),
      ExitCode::internal);
}

std::string joined(int argc, char** argv) {
  std::string line = "tandem";
  for (int i = 1; i < argc; ++i) line += " " + shell_word(argv[i]);
  return line;
}

/// The program as a user would call it again.
std::string program_word(int argc, char** argv) {
  return shell_word(argc > 0 && *argv[0] != '\0' ? argv[0] : "tandem");
}

/// Refuses arguments that are no UTF-8: they go into config.toml and JSON, which hold nothing else.
void refuse_other_than_utf8(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (is_utf8(argv[i])) continue;
    std::string shown = argv[i];
    for (char& c : shown) c = static_cast<unsigned char>(c) < 0x80 ? c : '?';
    throw UsageError(fmt::format("command line: '{}'", shown), "it holds bytes that are no UTF-8", "rename it");
  }
}

/// Standard error, where a message does not stand behind a run's live line.
class MessageSink final : public spdlog::sinks::base_sink<std::mutex> {
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t text;
    formatter_->format(message, text);
    clear_live_line();
    std::fwrite(text.data(), 1, text.size(), stderr);
  }
  void flush_() override { std::fflush(stderr); }
};

/// Commands whose whole work each of several processes would do.
constexpr std::array<std::string_view, 7> alone = {"bench", "calibrate", "eval", "export", "launch", "sample", "score"};

void set_up_logging() {
  auto logger = std::make_shared<spdlog::logger>("tandem", std::make_shared<MessageSink>());
  logger->set_pattern("tandem: %l: %v");
  spdlog::set_default_logger(std::move(logger));
}

int parse_and_run(int argc, char** argv) {
  CLI::App program{"Trains language models that do not fit on their GPU."};
  program.name("tandem");
  program.set_version_flag("--version", fmt::format("tandem {}", version));
  bool list_models = false;
  std::string log_level = "info";
  program.add_flag("--list-models", list_models, "names the built-in model shapes");
  program
      .add_option("--log-level", log_level,
                  "debug, info, warning or error: what is said on standard error. Default: info")
      ->type_name("LEVEL")
      ->check(CLI::IsMember({"debug", "info", "warning", "error"}));
  program.fallthrough();
  std::vector<std::pair<CLI::App*, CommandFunction>> commands;
  for (auto* add : {add_train_command, add_plan_command, add_calibrate_command, add_bench_command, add_eval_command,
                    add_score_command, add_sample_command, add_digest_command, add_export_command, add_report_command,
                    add_launch_command, add_completion_command}) {
    CommandFunction run = add(program);
    commands.emplace_back(program.get_subcommands({}).back(), std::move(run));
  }
  program.require_subcommand(0, 1);
  refuse_other_than_utf8(argc, argv);
  try {
    std::vector<std::string> words = with_command_marked({argv + std::min(argc, 1), argv + argc});
    std::ranges::reverse(words);  // as the parser takes them
    program.parse(std::move(words));
  } catch (const CLI::CallForHelp&) {
    const auto chosen = program.get_subcommands();
    print_output(chosen.empty() ? program.help() : chosen.front()->help("tandem"));
    return 0;
  } catch (const CLI::CallForVersion&) {
    print_output(fmt::format("tandem {}\n", version));
    return 0;
  } catch (const CLI::ParseError& error) {
    throw UsageError("command line", error.what(), "see tandem --help");
  }
  spdlog::set_level(spdlog::level::from_str(log_level));
  static_cast<void>(supported_isas());  // reads its limit from the environment, and throws where that is not one
  if (list_models) {
    std::string text;
    for (const auto& name : builtin_models()) text += name + "\n";
    print_output(text);
    return 0;
  }
  const ProgramContext context{program_word(argc, argv), joined(argc, argv)};
  for (const auto& [app, run] : commands) {
    if (!app->parsed()) continue;
    if (std::ranges::find(alone, app->get_name()) != alone.end()) require_one_process(app->get_name());
    return run(context);
  }
  print_output(program.help());
  throw UsageError("command line", "no subcommand", "for example tandem train --help");
}

/// Opens replacements for standard streams that are closed: the first files opened would otherwise take their places,
/// and messages go into them. A replacement fails as a closed stream does: the input cannot be read, the outputs not
/// written.
void fill_closed_streams() noexcept {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(stream, F_GETFD) != -1 || errno != EBADF) continue;
    static_cast<void>(::open("/dev/null", stream == STDIN_FILENO ? O_WRONLY : O_RDONLY));  // takes the lowest number
  }
}

/// glibc lets its heaps, of which each thread may have one, keep twice as much as the largest block that was ever
/// freed, 64 MiB at most. What a run keeps is to be known before, so the bounds are fixed.
void bound_heaps() noexcept {
  constexpr int mib = 1 << 20;
  ::mallopt(M_MMAP_THRESHOLD, mib);
  ::mallopt(M_TRIM_THRESHOLD, 2 * mib);
}

}  // namespace

void print_output(const std::string& text) {
  if (std::fputs(text.c_str(), stdout) < 0 || std::fflush(stdout) != 0) {
    throw WriteError("cannot write to standard output", "whoever reads it has gone or the disk is full");
  }
}

int run_program(int argc, char** argv) noexcept {
  fill_closed_streams();  // before anything is opened
  try {
    bound_heaps();
    std::signal(SIGPIPE, SIG_IGN);  // a closed pipe is an error of writing, told like others
    std::signal(SIGXFSZ, SIG_IGN);  // a limit on the size of files is an error of writing, too
    set_up_logging();
    set_stall_handler([](const StalledError& error) { end_process_after(error, std::chrono::minutes(1)); });
    return parse_and_run(argc, argv);
  } catch (const PlanError& error) {
    std::fputs(error.table().c_str(), stderr);
    return report(error.what(), error.exit_code());
  } catch (const Error& error) {
    if (error.exit_code() == ExitCode::internal) return report_fault(error.what());
    return report(error.what(), error.exit_code());
  } catch (const std::filesystem::filesystem_error& error) {
    return report(fmt::format("{}: {}", error.path1().string(), error.code().message()), ExitCode::bad_input);
  } catch (const std::system_error& error) {
    if (error.code() != std::errc::resource_unavailable_try_again) return report_fault(error.what());
    return report("cannot start a thread: the system has none left; raise the limit of threads (ulimit -u)",
                  ExitCode::device);
  } catch (const std::bad_alloc&) {
    return report_fault("no memory left; a smaller --host-memory ceiling would have refused the run");
  } catch (const std::exception& error) {
    return report_fault(error.what());
  } catch (...) {
    return report_fault("an unknown exception");
  }
}

}  // namespace tandem
