// tandem report
#include <fmt/format.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands/run_report.hpp"
#include "cli/common/commands.hpp"
#include "core/base/error.hpp"
#include "core/base/json_text.hpp"
#include "io/atomic_file.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;

struct ReportFlags {
  std::string run;
  std::string out;
  bool json = false;
};

/// A report is made anew; any other file of the name is not overwritten.
void refuse_other_file(const fs::path& file) {
  std::error_code ignored;
  if (!fs::exists(file, ignored)) return;
  std::array<char, 1024> begin{};
  std::ifstream in(file, std::ios::binary);
  in.read(begin.data(), begin.size());
  const std::string_view text(begin.data(), static_cast<std::size_t>(in.gcount()));
  if (fs::is_regular_file(file, ignored) && text.find("<title>tandem report</title>") != text.npos) return;
  throw WriteError(fmt::format("--out {}", file.string()), "it exists and is no report of tandem", "name another file");
}

int report(const ReportFlags& flags) {
  const RunReport report(flags.run);
  const fs::path file = flags.out.empty() ? fs::path(flags.run) / "report.html" : fs::path(flags.out);
  refuse_other_file(file);
  write_file_atomically(file, report.html());
  if (!flags.json) {
    print_output(fmt::format("{}: {} steps\n", file.string(), report.steps()));
    return 0;
  }
  nlohmann::ordered_json json{{"report", file.string()}, {"steps", report.steps()}, {"best", nullptr}};
  if (const RunPoint* best = report.best()) json["best"] = {{"step", best->step}, {"eval_loss", *best->eval_loss}};
  print_output(json_document(json));
  return 0;
}

}  // namespace

CommandFunction add_report_command(CLI::App& program) {
  auto* command = program.add_subcommand("report", "writes a run as one HTML page with plots");
  auto flags = std::make_shared<ReportFlags>();
  command->add_option("run", flags->run, "run directory, also of a run that still trains")
      ->required()
      ->type_name("DIR");
  command
      ->add_option(
          "--out", flags->out,
          "file of the page; an earlier report is replaced, no other file is. Default: report.html in the run. "
          "Example: --out first.html")
      ->type_name("FILE");
  command->add_flag("--json", flags->json, "one JSON object on standard output. Default: off");
  command->footer("Example: tandem report runs/first");
  return [flags](const ProgramContext&) { return report(*flags); };
}

}  // namespace tandem
