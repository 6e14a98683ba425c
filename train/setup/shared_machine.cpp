#include "train/setup/shared_machine.hpp"

#include <algorithm>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "scheduler/machine/profile.hpp"
#include "train/setup/performance.hpp"

namespace tandem {
namespace {

using Json = nlohmann::json;

/// Identity of this machine, as it was started.
std::string machine_id() {
  std::string id;
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::getline(file, id);
  return id;
}

/// Figures of one rank, as it tells them to the others.
Json json_of(const RunMachine& own, const std::string& device, bool is_first) {
  const PlanningFacts& facts = own.facts;
  return {{"machine", machine_id()},
          {"device", device},
          {"device_threads", own.device_threads},
          {"update_threads", own.update_threads},
          {"program_bytes", own.program_bytes},
          {"device_capacity", facts.device_capacity},
          {"device_reserved", facts.device_reserved},
          {"host_available", facts.host_available},
          {"host_limit", facts.host_limit},
          {"file_room", facts.file_room},
          {"profile", is_first && own.profile ? profile_toml(*own.profile) : ""}};
}

template <class T>
T most(const std::vector<Json>& ranks, const char* name) {
  T value{};
  for (const Json& rank : ranks) value = std::max(value, rank.at(name).get<T>());
  return value;
}

std::size_t least(const std::vector<Json>& ranks, const char* name) {
  std::size_t value = std::numeric_limits<std::size_t>::max();
  for (const Json& rank : ranks) value = std::min(value, rank.at(name).get<std::size_t>());
  return value;
}

std::map<std::string, std::size_t> ranks_by_machine(const std::vector<Json>& ranks) {
  std::map<std::string, std::size_t> counts;
  for (const Json& rank : ranks) ++counts[rank.at("machine").get<std::string>()];
  return counts;
}

/// Bytes that all ranks together may have of what each machine has: as many for each rank as there are where they are
/// fewest. 0, which stands for what is unknown, where one does not know.
std::size_t of_all(const std::vector<Json>& ranks, const char* name) {
  const auto counts = ranks_by_machine(ranks);
  std::size_t each = std::numeric_limits<std::size_t>::max();
  for (const Json& rank : ranks) {
    each = std::min(each, rank.at(name).get<std::size_t>() / counts.at(rank.at("machine").get<std::string>()));
  }
  return each * ranks.size();
}

}  // namespace

SharedMachine machine_of_all(Processes& processes, RunMachine own, const DeviceInfo& device) {
  processes.agree({{"kind of device", device.kind}, {"compute_key of the device", device.compute_key}});
  std::vector<Json> ranks;
  const Json told = json_of(own, device.name, processes.is_first());
  for (const std::string& text : processes.gather("machines of the ranks", told.dump())) {
    ranks.push_back(Json::parse(text));
  }
  SharedMachine shared{.machine = std::move(own), .device_names = {}};
  RunMachine& machine = shared.machine;
  machine.processes = processes.rank().count;
  machine.device_threads = most<int>(ranks, "device_threads");
  machine.update_threads = most<int>(ranks, "update_threads");
  machine.program_bytes = most<std::size_t>(ranks, "program_bytes") * ranks.size();
  machine.facts.device_capacity = least(ranks, "device_capacity");
  machine.facts.device_reserved = most<std::size_t>(ranks, "device_reserved");
  machine.facts.host_available = of_all(ranks, "host_available");
  machine.facts.host_limit = of_all(ranks, "host_limit");
  machine.facts.file_room = of_all(ranks, "file_room");
  machine.profile.reset();
  const auto toml = ranks.front().at("profile").get<std::string>();
  std::size_t together = 1;  // ranks on the machine that has most
  for (const auto& [id, count] : ranks_by_machine(ranks)) together = std::max(together, count);
  if (!toml.empty()) {
    machine.profile = shared_by(parse_profile(toml, "the calibration of rank 0"), static_cast<int>(together));
  }
  for (const Json& rank : ranks) shared.device_names.push_back(rank.at("device").get<std::string>());
  return shared;
}

}  // namespace tandem
