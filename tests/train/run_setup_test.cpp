// Memory of a machine that a run may have.
#include "train/setup/run_setup.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/error.hpp"
#include "tests/scheduler/advice.hpp"
#include "tests/scheduler/machines.hpp"
#include "train/setup/performance.hpp"

namespace tandem {
namespace {

using namespace literals;  // NOLINT: sizes
using testing::advised_host_memory;
using ::testing::HasSubstr;
using ::testing::Not;

TrainConfig config_of(const char* policy = "host") {
  TrainConfig config;
  config.model = "tiny-llama";
  config.device = "host";
  config.threads = config.update_threads = 1;
  config.seq_len = 64;
  config.policy = parse_policy(policy);
  config.device_memory = 4_GiB;
  return config;
}

/// A machine with so much memory, of which so much is free.
Topology machine(std::size_t available, std::size_t room = 0) {
  Topology machine;
  machine.available_memory_bytes = available;
  machine.memory_room_bytes = machine.memory_bytes = std::max(available, room);
  return machine;
}

RunSetup set_up(const TrainConfig& config, const Topology& machine) {
  const ModelConfig model = builtin_model(config.model);
  return set_up_run(config, model, {.saves = true, .predicts = false}, {.host = &machine});
}

std::size_t all_bytes(const RunSetup& run) { return run.planned_device_bytes() + run.planned_host_bytes(); }

std::string refusal(const TrainConfig& config, const Topology& machine) {
  try {
    set_up(config, machine);
  } catch (const PlanError& error) {
    return error.what();
  }
  ADD_FAILURE() << "not refused";
  return {};
}

std::size_t bytes_of(const RunSetup& run, std::string_view name) {
  std::size_t bytes = 0;
  for (const MemoryEntry& e : run.memory.entries) {
    if (e.name == name) bytes += e.bytes;
  }
  return bytes;
}

// Largest difference of the process's own memory from one setup to the next.
constexpr std::size_t unlike = 16_MiB;

TEST(RunSetup, UpdateThreadsAreThePlans) {
  TrainConfig config = config_of();
  config.update_threads = 3;
  EXPECT_EQ(offload_options(config).update_threads, 3);
}

// The device paces parameters, whatever their state takes; a profile's rate is of fp32 state.
TEST(RunSetup, AnEmulatedUpdateRateIsThatOfEveryFormat) {
  MachineProfile profile;
  profile.cpu_update.value = 1e9;
  TrainConfig config = config_of();
  config.update_rate = 4e6;
  for (const StateFormat state : state_formats) {
    config.state = state;
    EXPECT_NEAR(in_format(as_emulated(profile, config), state).cpu_update.value, 4e6, 1.0) << name_of(state);
  }
}

TEST(RunSetup, HostMemoryIsEnoughForAllRowsOrTheRunIsRefused) {
  TrainConfig config = config_of();
  config.micro_batch = 1024;
  config.recompute = Recompute{.blocks = all_blocks};
  config.offload_activations = true;
  const RunSetup roomy = set_up(config, machine(64_GiB));
  const std::size_t offloaded = bytes_of(roomy, "activations, offloaded");
  ASSERT_GT(offloaded, 4 * unlike);
  const std::size_t taken = all_bytes(roomy) - bytes_of(roomy, "program and libraries");
  EXPECT_NO_THROW(set_up(config, machine(taken + unlike)));
  // The engine by itself would fit, and the run does not.
  EXPECT_THAT(refusal(config, machine(taken - offloaded / 2)), HasSubstr("is available"));
}

TEST(RunSetup, ADeviceOnHostMemoryIsPlannedBesideTheHost) {
  for (const char* policy : {"auto", "host", "static:0.5"}) {
    TrainConfig config = config_of(policy);
    const std::size_t at_will = all_bytes(set_up(config, machine(64_GiB)));
    bool smaller = false;
    for (std::size_t available = at_will; available > at_will / 2; available -= at_will / 64) {
      try {
        const RunSetup run = set_up(config, machine(available));
        EXPECT_LE(all_bytes(run) - bytes_of(run, "program and libraries"), available) << policy;
        smaller |= all_bytes(run) < at_will;
      } catch (const PlanError&) {
        EXPECT_LT(available, at_will) << policy;
        break;
      }
    }
    EXPECT_TRUE(smaller) << policy << ": what fits is found where not all that is wished for does";
  }
}

TEST(RunSetup, ACopyOfTheStateIsBookedOnlyBesideBoth) {
  TrainConfig config = config_of();
  config.checkpoint_every = 10;
  const RunSetup with_copy = set_up(config, machine(64_GiB));
  ASSERT_TRUE(with_copy.saving.copies);
  const std::size_t copy = bytes_of(with_copy, "checkpoint copy");
  const std::size_t taken = all_bytes(with_copy) - bytes_of(with_copy, "program and libraries");
  // A tenth is left to everybody else.
  EXPECT_TRUE(set_up(config, machine(taken + taken / 9 + unlike)).saving.copies);
  const RunSetup without = set_up(config, machine(taken - copy / 2));
  EXPECT_FALSE(without.saving.copies);
  EXPECT_GT(bytes_of(without, "checkpoint buffer"), 0U);
  // A ceiling does not make more of it.
  config.host_memory = 1_GiB;
  EXPECT_FALSE(set_up(config, machine(taken - copy / 2)).saving.copies);
}

/// Eight blocks, state and weights on the host: what is left of the ceiling is for activations.
RunSetup set_up_eight(TrainConfig config, std::optional<Recompute> recompute, std::size_t ceiling,
                      const MachineProfile* profile = nullptr) {
  ModelConfig model = builtin_model("tiny-llama");
  model.layers = 8;
  config.micro_batch = 8;
  config.resident_layers = 0;
  config.prefetch_layers = 1;
  config.recompute = recompute;
  config.device_memory = ceiling;
  return set_up_run(config, model, {.predicts = profile != nullptr}, {.profile = profile});
}

TEST(RunSetup, AsFewBlocksAsFitAreComputedAgain) {
  const auto bytes = [](const Recompute& recompute) {
    return set_up_eight(config_of(), recompute, 4_GiB).planned_device_bytes();
  };
  const std::vector<Recompute> ways = {{0}, {0, true}, {1, true}, {3, true}, {7, true}, {8}};  // each takes less
  const MachineProfile profile = testing::desktop();
  for (const MachineProfile* known : {static_cast<const MachineProfile*>(nullptr), &profile}) {
    for (std::size_t i = 0; i + 1 < ways.size(); ++i) {
      const std::size_t ceiling = bytes(ways[i]);
      const RunShape shape = set_up_eight(config_of(), std::nullopt, ceiling, known).model->shape();
      EXPECT_EQ((Recompute{shape.recomputed_blocks, shape.selective}), ways[i]) << i;
      EXPECT_FALSE(shape.offload_inputs);
      if (i == 0) continue;
      EXPECT_THROW(set_up_eight(config_of(), ways[i - 1], ceiling, known), PlanError) << i;
    }
  }
  const auto table = [](const Recompute& recompute) { return set_up_eight(config_of(), recompute, 4_GiB).table(); };
  EXPECT_THAT(table({0}), HasSubstr("all kept"));
  EXPECT_THAT(table({0, true}), HasSubstr("selectively recomputed\n"));
  EXPECT_THAT(table({3}), HasSubstr("3 of 8 blocks recomputed\n"));
  EXPECT_THAT(table({3, true}), HasSubstr("3 of 8 blocks recomputed, others selectively\n"));
  EXPECT_THAT(table({8}), HasSubstr("block recompute\n"));
  EXPECT_THAT(table({all_blocks}), HasSubstr("block recompute\n"));
}

TEST(RunSetup, InputsAreOffloadedWhereNothingElseFits) {
  const MachineProfile profile = testing::desktop();
  for (const MachineProfile* known : {static_cast<const MachineProfile*>(nullptr), &profile}) {
    std::size_t ceiling = set_up_eight(config_of(), Recompute{8}, 4_GiB).planned_device_bytes();
    const auto fits = [&] {
      try {
        set_up_eight(config_of(), Recompute{8}, ceiling, known);
        return true;
      } catch (const PlanError&) {
        return false;
      }
    };
    while (fits()) ceiling -= 256_KiB;
    EXPECT_TRUE(set_up_eight(config_of(), std::nullopt, ceiling, known).model->shape().offload_inputs);
  }
}

TEST(RunSetup, OfBlocksComputedAgainTheModelHasEnough) {
  EXPECT_NO_THROW(set_up_eight(config_of(), Recompute{8}, 4_GiB));
  EXPECT_THROW(set_up_eight(config_of(), Recompute{9}, 4_GiB), UsageError);
  TrainConfig config = config_of();
  config.offload_activations = true;
  EXPECT_THROW(set_up_eight(config, Recompute{7}, 4_GiB), UsageError);
  EXPECT_NO_THROW(set_up_eight(config, Recompute{8}, 4_GiB));
}

// A fixed policy, so that seconds are those of the same plans.
TEST(RunSetup, SomeBlocksAreNeverPredictedSlowerThanAllOrNone) {
  const auto seconds = [](const RunSetup& run) { return run.prediction->choice.simulation.step_seconds; };
  MachineProfile profile = testing::desktop();
  for (const double flops : {1e9, 20e9, 400e9}) {
    profile.matmul.value = profile.attention.value = flops;
    for (const char* policy : {"host", "stream", "static:0.7"}) {
      TrainConfig config = config_of(policy);
      const std::size_t roomy = set_up_eight(config, Recompute{0}, 4_GiB).planned_device_bytes();
      for (std::size_t ceiling = roomy; ceiling > roomy / 2; ceiling -= roomy / 8) {
        const double chosen = seconds(set_up_eight(config, std::nullopt, ceiling, &profile));
        for (const Recompute& way : {Recompute{0}, Recompute{0, true}, Recompute{8}}) {
          try {
            EXPECT_LE(chosen, seconds(set_up_eight(config, way, ceiling, &profile))) << policy << " " << ceiling;
          } catch (const PlanError&) {
            EXPECT_LT(ceiling, roomy);
          }
        }
      }
    }
  }
}

TEST(RunSetup, TheAdvisedCeilingOfHostMemoryFits) {
  TrainConfig config = config_of();
  for (const std::size_t ceiling : {1_MiB, 20_MiB}) {
    config.host_memory = ceiling;
    const std::string text = refusal(config, machine(64_GiB));
    EXPECT_THAT(text, HasSubstr("the ceiling is " + format_bytes(ceiling)));
    config.host_memory = advised_host_memory(text);
    EXPECT_LE(set_up(config, machine(64_GiB)).planned_host_bytes(), config.host_memory);
  }
}

TEST(RunSetup, ACeilingInsistsWithinWhatTheMachineHas) {
  TrainConfig config = config_of();
  const std::size_t taken = all_bytes(set_up(config, machine(64_GiB)));
  const std::size_t half = taken / 2;
  EXPECT_THAT(refusal(config, machine(half)), Not(HasSubstr("--host-memory")));
  config.host_memory = 64_GiB;
  EXPECT_THAT(refusal(config, machine(half)), Not(HasSubstr("--host-memory")));
  EXPECT_GT(all_bytes(set_up(config, machine(half, 2 * taken))), half);
  // A group may have less left than the machine.
  Topology full = machine(half, 2 * taken);
  full.memory_room_bytes = half;
  EXPECT_THAT(refusal(config, full), HasSubstr("is available"));
}

}  // namespace
}  // namespace tandem
