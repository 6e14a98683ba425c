#include "train/saving/save_prediction.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "offload/engine/state_io.hpp"
#include "scheduler/simulation/simulator.hpp"
#include "train/saving/save_pace.hpp"

namespace tandem {
namespace {

/// Bytes of state a second that one thread copies: each is read and written. What lives on the device crosses the link.
double copying_rate(const MachineProfile& profile, const Plan& plan) {
  constexpr double moved = 2.0;
  const bool known = !profile.by_threads.empty() && profile.by_threads.front().dram_copy > 0.0;
  const double host = known ? profile.by_threads.front().dram_copy : profile.host_stream.value;
  const double link = profile.pageable_to_host.known() ? profile.pageable_to_host.value : profile.to_host.value;
  const auto shares = plan.shares();
  const double all = static_cast<double>(shares.cpu + shares.streamed + shares.resident);
  const double on_device = all > 0.0 ? static_cast<double>(shares.resident) / all : 0.0;
  return 1.0 / ((1.0 - on_device) * moved / host + on_device / link);
}

/// Steps that are alike.
struct Stretch {
  double steps = 0.0;
  double step_seconds = 0.0;
  double seconds() const { return steps * step_seconds; }
};

}  // namespace

std::string SaveSlowdown::text() const {
  return fmt::format("{:.2f} x for {} step{}", factor, steps, steps == 1 ? "" : "s");
}

std::string Saving::text() const {
  if (every == 0) return {};
  std::string way = copies ? "from a copy of the state, written while steps go on"
                           : "beside training: an update waits until its state is read";
  if (slowdown) {
    way += ", predicted step " + slowdown->text();
  } else if (!copies) {
    way += " (not predicted: the disk's rate is unknown)";
  }
  return fmt::format("saving every {} step{}, {}\n", every, every == 1 ? "" : "s", way);
}

std::optional<SaveSlowdown> predict_saving(const Saving& how, const ParameterLayout& layout, const Plan& plan,
                                           MachineProfile profile, std::span<const LayerSeconds> compute, double disk) {
  if (disk > 0.0) profile.disk.value = disk;
  if (!profile.disk.known()) return std::nullopt;
  const auto stretch = [&](const MachineProfile& machine, SimulationOptions options) {
    options.micro_batches = plan.max_micro_batches;
    const Simulation s = simulate(layout, plan, machine, compute, options);
    return Stretch{static_cast<double>(s.steps), s.step_seconds};
  };
  const Stretch alone = stretch(profile, {});
  // Reading is one thing for the simulator, whether to the disk or into memory.
  MachineProfile reading = profile;
  if (how.copies) {
    reading.disk.value = copying_rate(profile, plan);
    reading.disk_cores.value = 1.0;
  }
  const Stretch read = stretch(reading, {.save = true});
  Stretch written{0.0, 0.0};
  if (how.copies) {
    const double at_full_speed =
        static_cast<double>(StateCopy::bytes(layout, optimizer_of(plan.state), how.saved)) / profile.disk.value;
    const double usable = SaveInterval{how.every, alone.step_seconds}.usable() - read.seconds();
    const double seconds = SavePace::seconds_beside(at_full_speed, usable);
    written = stretch(profile, {.disk_share = at_full_speed / seconds});
    written.steps = std::clamp(std::ceil(seconds / written.step_seconds), 0.0,
                               std::max(0.0, static_cast<double>(how.every) - read.steps));
  }
  const double steps = read.steps + written.steps;
  return SaveSlowdown{(read.seconds() + written.seconds()) / (steps * alone.step_seconds), static_cast<int>(steps)};
}

}  // namespace tandem
