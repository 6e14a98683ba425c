// tandem plan
#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.hpp"
#include "cli/flags.hpp"
#include "core/error.hpp"
#include "train/model_source.hpp"
#include "train/run_setup.hpp"
#include "train/units.hpp"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

struct PlanFlags {
  ConfigFlags config;
  bool json = false;
};

Json entries_of(const MemoryPlan& memory) {
  Json entries = Json::array();
  for (const MemoryEntry& e : memory.entries) {
    entries.push_back(
        {{"name", e.name}, {"phase", e.phase}, {"where", std::string(name_of(e.place))}, {"bytes", e.bytes}});
  }
  return entries;
}

Json json_of(const RunSetup& run) {
  const auto shares = run.plan.shares();
  const double all = std::max(1.0, static_cast<double>(shares.cpu + shares.streamed + shares.resident));
  const auto share = [&](std::int64_t part) { return static_cast<double>(part) / all; };
  return {{"fits", true},
          {"device_bytes", run.planned_device_bytes()},
          {"host_bytes", run.planned_host_bytes()},
          {"entries", entries_of(run.memory)},
          {"policy", run.plan.policy.text()},
          {"shares",
           {{"cpu", share(shares.cpu)},
            {"gpu_streamed", share(shares.streamed)},
            {"gpu_resident", share(shares.resident)}}},
          {"predicted", nullptr},
          {"bound_by", nullptr},
          {"advice", ""}};
}

Json json_of(const PlanError& error) {
  return {{"fits", false},         {"device_bytes", nullptr}, {"host_bytes", nullptr}, {"entries", Json::array()},
          {"policy", nullptr},     {"shares", nullptr},       {"predicted", nullptr},  {"bound_by", nullptr},
          {"advice", error.what()}};
}

int plan(const PlanFlags& flags) {
  TrainConfig config = flags.config.config();
  check_config(config);
  const ModelSource source = find_model(config.model);
  config.seq_len = sequence_length(config, source.config);
  try {
    const RunSetup run = set_up_run(config, source.config, frozen_layout(source.config, config.freeze),
                                    {.training = true, .saves = true});
    if (flags.json) {
      print_output(json_of(run).dump(2) + "\n");
    } else {
      print_output(fmt::format("{}, {} parameters, sequences of {}, micro-batch {}\n{}", run.model_config.name,
                               format_count(run.layout.parameter_count()), config.seq_len, config.micro_batch,
                               run.table()));
    }
  } catch (const PlanError& error) {
    if (flags.json) print_output(json_of(error).dump(2) + "\n");
    throw;
  }
  return 0;
}

}  // namespace

CommandFunction add_plan_command(CLI::App& program) {
  auto* command = program.add_subcommand("plan", "memory plan of a run; allocates nothing; takes the flags of train");
  auto flags = std::make_shared<PlanFlags>();
  flags->config.add_to(*command);
  command->add_flag("--json", flags->json, "one JSON object on standard output. Default: off");
  command->footer("Example: tandem plan --model gpt2 --device host --device-memory 300MiB --seq-len 256");
  return [flags](const ProgramContext&) { return plan(*flags); };
}

}  // namespace tandem
