#include "train/report/resource_use.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "scheduler/machine/cost_model.hpp"

namespace tandem {
namespace {

double rate(std::uint64_t bytes, double seconds) {
  return bytes > 0 && seconds > 0.0 ? static_cast<double>(bytes) / seconds : std::numeric_limits<double>::quiet_NaN();
}

}  // namespace

ResourceUse use_between(const EngineCounters& before, const EngineCounters& after, double seconds, double dram_rate) {
  constexpr double nearly_all = 0.9;
  const auto busy = [&](double LaneSeconds::*lane) { return after.busy.*lane - before.busy.*lane; };
  ResourceUse use;
  use.h2d_bytes = after.bytes_host_to_device - before.bytes_host_to_device;
  use.d2h_bytes = after.bytes_device_to_host - before.bytes_device_to_host;
  use.file_read_bytes = after.bytes_from_file - before.bytes_from_file;
  use.file_write_bytes = after.bytes_to_file - before.bytes_to_file;
  use.h2d_bytes_per_second = rate(use.h2d_bytes, busy(&LaneSeconds::host_to_device));
  use.d2h_bytes_per_second = rate(use.d2h_bytes, busy(&LaneSeconds::device_to_host));
  use.dram_bytes_per_second = static_cast<double>(after.dram_bytes - before.dram_bytes) / seconds;
  const std::array<std::pair<double, Resource>, 5> lanes{
      {{busy(&LaneSeconds::compute) + busy(&LaneSeconds::device_update), Resource::device},
       {busy(&LaneSeconds::host_to_device), Resource::to_device},
       {busy(&LaneSeconds::device_to_host), Resource::to_host},
       {busy(&LaneSeconds::cpu), Resource::cores},
       {std::max(busy(&LaneSeconds::file_read), busy(&LaneSeconds::file_write)), Resource::file}}};
  Resource most = std::max_element(lanes.begin(), lanes.end(), [](const auto& a, const auto& b) {
                    return a.first < b.first;
                  })->second;
  if (most == Resource::cores && dram_rate > 0.0 && use.dram_bytes_per_second >= nearly_all * dram_rate) {
    most = Resource::dram;
  }
  use.bound_by = name_of(most);
  return use;
}

StepRates rates_between(const EngineCounters& before, const EngineCounters& after, bool speculates) {
  const bool ahead = after.parameters_speculated > before.parameters_speculated;
  const bool as_predicted = ahead == speculates && after.parameters_taken_back == before.parameters_taken_back;
  const auto rate_of = [&](std::uint64_t EngineCounters::*amount, double LaneSeconds::*lane) {
    const double per_second = rate(after.*amount - before.*amount, after.busy.*lane - before.busy.*lane);
    return std::isnan(per_second) ? 0.0 : per_second;
  };
  return {
      .compute_seconds = after.busy.compute - before.busy.compute,
      .to_device = rate_of(&EngineCounters::bytes_host_to_device, &LaneSeconds::host_to_device),
      .to_host = rate_of(&EngineCounters::bytes_device_to_host, &LaneSeconds::device_to_host),
      .cpu_update = as_predicted ? rate_of(&EngineCounters::parameters_updated_cpu, &LaneSeconds::cpu_update) : 0.0};
}

}  // namespace tandem
