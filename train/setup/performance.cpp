#include "train/setup/performance.hpp"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include "api/calibrate.hpp"
#include "api/profile_cache.hpp"
#include "core/base/error.hpp"
#include "models/transformer/input_store.hpp"
#include "scheduler/simulation/input_copies.hpp"
#include "train/setup/module_work.hpp"

namespace tandem {
namespace {

static_assert(InputStore::ring(1) == 1 + InputCopies::buffers_ahead, "the simulator sends inputs as the model does");

/// The figure that varies most, where one varies too much; else the first of the doubts.
const std::string& worst(const std::vector<std::string>& lines, const MachineProfile& profile) {
  const auto spread = [&](const ProfileField& field) { return (profile.*field.figure).spread; };
  const ProfileField& widest = *std::ranges::max_element(profile_fields(), {}, spread);
  const std::string its_line = fmt::format("{}.{} varies", widest.section, widest.key);
  const auto found = std::ranges::find_if(lines, [&](const std::string& line) { return line.starts_with(its_line); });
  return found != lines.end() ? *found : lines.front();
}

void warn_of_doubts(const MachineProfile& profile, const std::filesystem::path& file) {
  const auto lines = doubts(profile);
  if (lines.empty()) return;
  spdlog::warn(
      "the calibration in {} looks wrong in {} {}, the worst: {}; predictions may be off: "
      "`tandem calibrate --show` lists all, `tandem calibrate` measures anew",
      file.string(), lines.size(), lines.size() == 1 ? "place" : "places", worst(lines, profile));
}

}  // namespace

std::vector<LayerWork> work_of(const ModelConfig& config, const RunShape& shape, const SequenceFacts& sequences,
                               const ParameterLayout* layout) {
  std::vector<LayerWork> work;
  for (const LayerModules& modules : module_work_of(config, shape, sequences, layout)) {
    LayerWork& sum = work.emplace_back();
    for (const LayerWork& module : modules) add(sum, module);
  }
  return work;
}

std::size_t offloaded_input_bytes(const ModelConfig& c, const RunShape& shape) noexcept {
  if (!shape.offload_inputs) return 0;
  return static_cast<std::size_t>(shape.batch * shape.sequence * c.width) * size_of(shape.compute);
}

MachineProfile as_emulated(MachineProfile profile, const TrainConfig& config) {
  if (config.link_bandwidth > 0.0) profile = with_link(std::move(profile), config.link_bandwidth);
  if (config.update_rate > 0.0) {
    // The emulated rate is that of the run's own format, profiles hold that of fp32 state.
    const auto of_fp32 = update_bytes_each(config.state) / update_bytes_each(StateFormat::fp32);
    profile = with_update_rate(std::move(profile), config.update_rate * of_fp32);
  }
  return profile;
}

std::optional<MachineProfile> find_calibration(const Device& device) {
  const std::filesystem::path cached = cached_profile_path(device);
  std::error_code hidden;  // in a folder that may not be looked into: not calibrated
  if (cached.empty() || !std::filesystem::exists(cached, hidden)) return std::nullopt;
  std::optional<MachineProfile> profile;
  try {
    profile = read_profile(cached);
  } catch (const Error& error) {
    spdlog::warn("the calibration of this machine is not used: {}", error.what());
    return std::nullopt;
  }
  if (const std::string differs = difference(*profile, identify(device)); !differs.empty()) {
    spdlog::warn("the calibration in {} is stale: {}; run `tandem calibrate`", cached.string(), differs);
    return std::nullopt;
  }
  warn_of_doubts(*profile, cached);
  return profile;
}

}  // namespace tandem
