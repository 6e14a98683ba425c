#include "train/save_prediction.hpp"

#include <fmt/format.h>

#include "scheduler/simulator.hpp"

namespace tandem {

std::string SaveSlowdown::text() const {
  return fmt::format("{:.2f} x for {} step{}", factor, steps, steps == 1 ? "" : "s");
}

std::string Saving::text() const {
  if (every == 0) return {};
  std::string way = "from a copy of the state, which training stands still for";
  if (!copies) way = "beside training: an update waits until its state is read";
  if (!copies) way += slowdown ? ", predicted step " + slowdown->text() : " (not predicted: the disk's rate is unknown)";
  return fmt::format("saving every {} step{}, {}\n", every, every == 1 ? "" : "s", way);
}

std::optional<SaveSlowdown> predict_saving(const ParameterLayout& layout, const Plan& plan, MachineProfile profile,
                                           std::span<const LayerSeconds> compute, double disk) {
  if (disk > 0.0) profile.disk.value = disk;
  if (!profile.disk.known()) return std::nullopt;
  SimulationOptions options{.micro_batches = plan.max_micro_batches};
  const Simulation alone = simulate(layout, plan, profile, compute, options);
  options.save = true;
  const Simulation beside = simulate(layout, plan, profile, compute, options);
  return SaveSlowdown{beside.step_seconds / alone.step_seconds, beside.steps};
}

}  // namespace tandem
