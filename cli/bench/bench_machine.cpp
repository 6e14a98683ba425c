#include "cli/bench/bench_machine.hpp"

#include <cstdio>
#include <optional>
#include <utility>

#include "api/calibrate.hpp"
#include "cli/bench/bench_steps.hpp"
#include "train/runtime/stop_signal.hpp"
#include "train/setup/performance.hpp"
#include "train/setup/run_request.hpp"

namespace tandem {

void say(const std::string& line) { std::fputs((line + "\n").c_str(), stderr); }

MachineProfile calibrated(Device& device, const TrainConfig& config, const ParameterLayout& layout) {
  auto profile = find_calibration(device);
  const bool lacks_file = !config.state_dir.empty() && profile && !profile->knows_file();
  if (profile && !lacks_file) return *std::move(profile);
  say("calibrating");
  CalibrationOptions quick;
  quick.seconds_per_figure = 0.15;
  // The caches hold much of a small model.
  quick.working_set = calibrated_bytes_of_parameter * static_cast<std::size_t>(layout.state_elements());
  quick.state_folder = state_folder(config);
  quick.progress = [](std::string_view) {
    if (StopSignal::received() != 0) throw BenchInterrupted{};
  };
  return calibrate(device, quick);
}

}  // namespace tandem
