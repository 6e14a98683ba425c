// tandem calibrate
#include <fmt/format.h>

#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "api/calibrate.hpp"
#include "api/open_device.hpp"
#include "api/profile_cache.hpp"
#include "cli/common/commands.hpp"
#include "cli/common/flags.hpp"
#include "cli/common/shipped_profiles.hpp"
#include "core/base/error.hpp"
#include "core/base/json_text.hpp"
#include "core/device/device_name.hpp"
#include "io/atomic_file.hpp"
#include "train/setup/run_setup.hpp"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

struct CalibrateFlags {
  ConfigFlags config;
  std::string out;
  std::string profile;
  bool show = false;
  bool json = false;
};

std::string shown(double value, std::string_view unit) {
  if (unit == "B") return format_bytes(static_cast<std::size_t>(value));
  if (unit == "1" || unit == "B/B" || unit == "B/parameter") return fmt::format("{:g}", value);
  if (unit == "s") return value < 1e-3 ? fmt::format("{:.1f} us", value * 1e6) : fmt::format("{:.1f} ms", value * 1e3);
  if (value >= 1e12) return fmt::format("{:.2f} T{}", value / 1e12, unit);
  if (value >= 1e9) return fmt::format("{:.2f} G{}", value / 1e9, unit);
  return fmt::format("{:.1f} M{}", value / 1e6, unit);
}

std::string explained(const MachineProfile& profile) {
  std::string text =
      fmt::format("{} | {} | {}\n", profile.name, profile.cpu.empty() ? "CPU unknown" : profile.cpu, profile.device);
  for (const ProfileField& field : profile_fields()) {
    const Figure& figure = profile.*field.figure;
    if (figure.value == 0.0) continue;
    text += fmt::format("{:<28}{:>22}  {}", fmt::format("{}.{}", field.section, field.key),
                        shown(figure.value, field.unit), field.help);
    if (figure.spread > 0.0) text += fmt::format(" (spread {:.0f}%)", 100.0 * figure.spread);
    text += "\n";
  }
  for (const ThreadFigures& row : profile.by_threads) {
    text += fmt::format("{:>2} thread{}: DRAM {}, read {}, CPU update {}, beside copies {}\n", row.threads,
                        row.threads == 1 ? " " : "s", shown(row.dram_copy, "B/s"), shown(row.dram_read, "B/s"),
                        shown(row.cpu_update, "parameters/s"), shown(row.cpu_update_with_copies, "parameters/s"));
  }
  const auto lines = doubts(profile);
  for (const std::string& line : lines) text += fmt::format("looks wrong: {}\n", line);
  if (lines.empty()) text += "nothing looks wrong\n";
  return text;
}

Json json_of(const MachineProfile& profile, const std::filesystem::path& file) {
  Json json{{"profile", file.string()}, {"cpu", profile.cpu}, {"device", profile.device}, {"figures", Json::object()}};
  for (const ProfileField& field : profile_fields()) {
    const Figure& figure = profile.*field.figure;
    json["figures"][fmt::format("{}.{}", field.section, field.key)] = {
        {"value", figure.value}, {"unit", field.unit}, {"spread", figure.spread}, {"source", figure.source}};
  }
  json["looks_wrong"] = doubts(profile);
  return json;
}

/// Refuses flags that contradict each other: a measurement must not overwrite a profile that was named to be read, and
/// no flag may be ignored.
void check(const CalibrateFlags& flags) {
  if (!flags.show && !flags.profile.empty()) {
    throw UsageError("--profile", "it goes with --show", "give --out FILE for a new profile");
  }
  if (flags.show && !flags.out.empty()) {
    throw UsageError("--out", "--show measures nothing", "name the file with --profile to have it shown");
  }
}

int show(const CalibrateFlags& flags, const MachineProfile& profile, const std::filesystem::path& file) {
  print_output(flags.json ? json_document(json_of(profile, file))
                          : explained(profile) + fmt::format("profile: {}\n", file.string()));
  return 0;
}

int run_calibrate(const CalibrateFlags& flags) {
  check(flags);
  const TrainConfig config = flags.config.config();
  require_one_device(config.device, "calibrate");
  if (!flags.profile.empty()) return show(flags, find_profile(flags.profile), flags.profile);
  const std::unique_ptr<Device> device = open_device(config.device, device_options(config));
  std::filesystem::path file = cached_profile_path(*device);
  if (flags.show) {
    if (file.empty() || !std::filesystem::exists(file)) {
      throw UsageError("calibrate --show", "this machine has not been calibrated", "run tandem calibrate first");
    }
  } else {
    if (!flags.out.empty() && std::filesystem::exists(flags.out)) {
      throw UsageError(fmt::format("--out {}", flags.out), "it exists", "name another file, or remove it");
    }
    CalibrationOptions options;
    options.progress = [](std::string_view what) { std::fputs(fmt::format("measuring {}\n", what).c_str(), stderr); };
    if (!flags.out.empty()) file = flags.out;
    if (file.empty()) throw UsageError("calibrate", "there is no home to keep the profile in", "give --out FILE");
    options.disk_folder = file.has_parent_path() ? file.parent_path() : ".";
    options.state_folder = config.state_dir.empty() ? options.disk_folder : state_folder(config);
    create_directories_or_throw(options.disk_folder);
    require_writable(file);
    cache_profile(calibrate(*device, options), file);
  }
  return show(flags, read_profile(file), file);
}

}  // namespace

CommandFunction add_calibrate_command(CLI::App& program) {
  auto* command = program.add_subcommand("calibrate", "measures this machine into a profile (TOML)");
  auto flags = std::make_shared<CalibrateFlags>();
  flags->config.add_to(*command, {"device", "device-memory", "threads", "update-threads", "numa-node", "state-dir"});
  command
      ->add_option("--out", flags->out,
                   "file for the profile. Default: the cache, where plan and bench find it. Example: --out here.toml")
      ->type_name("FILE");
  command->add_flag("--show", flags->show, "explains the profile and what looks wrong; measures nothing. Default: off");
  add_profile_option(
      *command, flags->profile,
      "with --show: another profile, a file or the name of a shipped one. Example: --profile 24gb-pcie4");
  command->add_flag("--json", flags->json, "one JSON object on standard output. Default: off");
  command->footer("Example: tandem calibrate --show");
  return [flags](const ProgramContext&) { return run_calibrate(*flags); };
}

}  // namespace tandem
