// A run has one plan, whether it is begun on an open device or planned for the profile of that machine.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/error.hpp"
#include "tests/scheduler/machines.hpp"
#include "train/hf/model_source.hpp"
#include "train/hf/trained_layout.hpp"
#include "train/setup/profile_machine.hpp"
#include "train/setup/run_setup.hpp"

namespace tandem {
namespace {

using namespace literals;  // NOLINT: sizes

constexpr std::size_t host_bytes = 8192_GiB;

/// A machine whose device is its CPU.
MachineProfile host_profile(const Device& device) {
  MachineProfile p = testing::desktop();
  p.device_kind = "host";
  p.device_memory.value = 2048.0 * static_cast<double>(1_GiB);
  p.host_memory.value = static_cast<double>(host_bytes);
  p.cores.value = device.info().threads;
  p.device_threads.value = device.info().threads;
  return p;
}

TrainConfig config_of(const std::string& model) {
  TrainConfig config;
  config.model = model;
  config.device = "host";
  config.threads = config.update_threads = 2;
  config.seq_len = 128;
  config.policy = Policy::host();
  config.device_memory = 1024_GiB;
  config.host_memory = 6000_GiB;
  return config;
}

struct FlagSet {
  const char* flags;
  void (*apply)(TrainConfig& config);
};
const FlagSet flag_sets[] = {
    {"", [](TrainConfig&) {}},
    {"--policy stream --state split",
     [](TrainConfig& c) { c.policy = Policy::stream(), c.state = StateFormat::split; }},
    {"--policy static:0.5 --checkpoint-every 10",
     [](TrainConfig& c) { c.policy = Policy::static_share(0.5), c.checkpoint_every = 10; }},
    {"--grad-accum 4", [](TrainConfig& c) { c.grad_accum = 4; }},
    {"--recompute block --micro-batch 3",
     [](TrainConfig& c) { c.recompute = Recompute{.blocks = all_blocks}, c.micro_batch = 3; }},
    {"--policy interleave:3 --compute bf16 --resident-layers 1",
     [](TrainConfig& c) { c.policy = Policy::interleave(3), c.compute = ComputeType::bf16, c.resident_layers = 1; }},
    {"--offload-activations --state bf16-moments --grad-accum 2",
     [](TrainConfig& c) { c.offload_activations = true, c.state = StateFormat::bf16_moments, c.grad_accum = 2; }},
    {"--device host,host --grad-accum 2 --checkpoint-every 5",
     [](TrainConfig& c) { c.device = "host,host", c.grad_accum = 2, c.checkpoint_every = 5; }},
};

/// Everything that people see of a plan, to the byte.
std::string shown(const RunPlan& run) {
  std::string text = run.table() + run.saving.text() + run.order + run.plan.policy_text();
  for (const MemoryEntry& e : run.all_memory().entries) {
    text += e.name + " " + e.phase + " " + std::string(name_of(e.place)) + " " + std::to_string(e.bytes) + "\n";
  }
  if (run.prediction) text += std::to_string(run.prediction->choice.simulation.step_seconds);
  return text;
}

/// Memory that the process itself holds, which is no part of a profile.
std::size_t program_bytes_in(const RunPlan& run) {
  std::size_t bytes = 0;
  for (const MemoryEntry& e : run.all_memory().entries) bytes += e.name == "program and libraries" ? e.bytes : 0;
  return bytes;
}

class OnePlanner : public ::testing::TestWithParam<std::string> {};

TEST_P(OnePlanner, AnOpenDeviceAndItsProfileGiveTheSamePlan) {
  const ModelConfig model = builtin_model(GetParam());
  const auto device = open_device("host", {.memory = 1_MiB, .threads = 2, .update_threads = 2});
  const MachineProfile profile = host_profile(*device);
  Topology topology;
  topology.available_memory_bytes = topology.memory_room_bytes = topology.memory_bytes = host_bytes;
  const bool small = frozen_layout(model, "").parameter_count() < 1'000'000'000;
  for (std::size_t i = 0; i < std::size(flag_sets); ++i) {
    SCOPED_TRACE(flag_sets[i].flags);
    TrainConfig config = config_of(GetParam());
    flag_sets[i].apply(config);
    // Simulations of many micro-batches of large models take their time.
    const bool predicts = i == (small ? 3U : 0U);
    const RunPurpose purpose{.training = true, .saves = true, .predicts = predicts};
    const RunSetup here =
        set_up_run(config, model, purpose, {.profile = predicts ? &profile : nullptr, .host = &topology});
    ProfileMachine elsewhere = machine_of(profile, config);
    if (!predicts) elsewhere.machine.profile.reset();
    elsewhere.machine.program_bytes = program_bytes_in(here);
    EXPECT_EQ(shown(here), shown(plan_run(config, model, purpose, elsewhere.machine)));
  }
}

// Both assume the same memory for the program itself, which holds little when it plans.
TEST(ProgramBytes, AreAssumedUntilMoreIsHeld) {
  EXPECT_EQ(program_bytes("host", 0), program_bytes("host", 2_MiB));
  EXPECT_EQ(program_bytes("host", 1_GiB), 1_GiB);
  EXPECT_GT(program_bytes("cuda", 0), program_bytes("host", 0));
}

TEST(OnePlannerRefusals, AreTheSameLine) {
  const ModelConfig model = builtin_model("llama3.2-1b");
  const auto device = open_device("host", {.memory = 1_MiB, .threads = 2, .update_threads = 2});
  const MachineProfile profile = host_profile(*device);
  Topology topology;
  topology.available_memory_bytes = topology.memory_room_bytes = topology.memory_bytes = host_bytes;
  TrainConfig config = config_of("llama3.2-1b");
  config.device_memory = 64_MiB;
  const auto refusal = [](const auto& plan) {
    try {
      plan();
    } catch (const PlanError& error) {
      return std::string(error.what());
    }
    return std::string("not refused");
  };
  const RunPurpose purpose{.training = true, .saves = true, .predicts = false};
  const std::string here = refusal([&] { set_up_run(config, model, purpose, {.host = &topology}); });
  const std::string elsewhere = refusal([&] {
    ProfileMachine machine = machine_of(profile, config);
    machine.machine.profile.reset();
    static_cast<void>(plan_run(config, model, purpose, machine.machine));
  });
  EXPECT_NE(here, "not refused");
  EXPECT_EQ(here, elsewhere);
}

std::string name_of_model(const ::testing::TestParamInfo<std::string>& info) {
  std::string name = info.param;
  for (char& c : name) {
    if (c == '.' || c == '-') c = '_';
  }
  return name;
}

INSTANTIATE_TEST_SUITE_P(BuiltinShapes, OnePlanner, ::testing::ValuesIn(builtin_models()), name_of_model);

}  // namespace
}  // namespace tandem
