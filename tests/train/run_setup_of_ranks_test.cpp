// Memory of a machine that several devices take, and the division of a step among them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/base/error.hpp"
#include "offload/engine/state_io.hpp"
#include "tests/scheduler/advice.hpp"
#include "tests/scheduler/machines.hpp"
#include "train/setup/run_setup.hpp"

namespace tandem {
namespace {

using namespace literals;  // NOLINT: sizes
using testing::advised_host_memory;
using ::testing::HasSubstr;
using ::testing::Not;

// Largest difference of the process's own memory from one setup to the next.
constexpr std::size_t unlike_of_rank = 16_MiB;

TrainConfig config_of(int ranks, const char* policy = "host") {
  TrainConfig config;
  config.model = "tiny-llama";
  config.device = "host";
  for (int rank = 1; rank < ranks; ++rank) config.device += ",host";
  config.threads = config.update_threads = 1;
  config.seq_len = 64;
  config.grad_accum = 6;
  config.policy = parse_policy(policy);
  config.device_memory = 4_GiB;
  return config;
}

Topology machine_with(std::size_t available) {
  Topology machine;
  machine.available_memory_bytes = machine.memory_room_bytes = machine.memory_bytes = available;
  return machine;
}

RunSetup set_up_ranks(const TrainConfig& config, const Topology& machine, const MachineProfile* profile = nullptr) {
  return set_up_run(config, builtin_model(config.model), {.saves = true, .predicts = profile != nullptr},
                    {.profile = profile, .host = &machine});
}

std::vector<const RunSetup*> all_of(const RunSetup& run) {
  std::vector<const RunSetup*> all{&run};
  for (const RunSetup& peer : run.peers) all.push_back(&peer);
  return all;
}

std::size_t bytes_of(const MemoryPlan& memory, std::string_view name) {
  std::size_t bytes = 0;
  for (const MemoryEntry& e : memory.entries) bytes += e.name == name ? e.bytes : 0;
  return bytes;
}

/// Bytes of the whole machine, where devices are of its own memory.
std::size_t bytes_of_all(const RunSetup& run) {
  return run.planned_host_bytes() + run.planned_device_bytes() * static_cast<std::size_t>(run.ranks());
}

std::string refusal_of_ranks(const TrainConfig& config, const Topology& machine) {
  try {
    set_up_ranks(config, machine);
  } catch (const PlanError& error) {
    return error.what();
  }
  ADD_FAILURE() << "not refused";
  return {};
}

TEST(RunSetupOfRanks, EachHasItsPartOfTheMicroBatchesAndOfTheState) {
  const MachineProfile profile = testing::desktop();
  for (const MachineProfile* known : {static_cast<const MachineProfile*>(nullptr), &profile}) {
    for (const char* policy : {"device", "host", "stream", "interleave:2", "static:0.5", "auto"}) {
      const RunSetup one = set_up_ranks(config_of(1, policy), machine_with(64_GiB), known);
      EXPECT_EQ(one.ranks(), 1);
      EXPECT_EQ(one.batch_slots, 6U);
      for (const int ranks : {2, 3}) {
        const RunSetup run = set_up_ranks(config_of(ranks, policy), machine_with(64_GiB), known);
        ASSERT_EQ(run.ranks(), ranks);
        EXPECT_EQ(run.compute_key(), one.compute_key());
        std::int64_t updated = 0;
        int index = 0;
        for (const RunSetup* of_rank : all_of(run)) {
          EXPECT_EQ(of_rank->options.rank, (Rank{index++, ranks})) << policy;
          EXPECT_EQ(of_rank->options.max_micro_batches, 6 / ranks);
          EXPECT_EQ(of_rank->batch_slots, static_cast<std::size_t>(6 / ranks));
          EXPECT_EQ(of_rank->plan.rank, of_rank->options.rank);
          const Plan::Shares shares = of_rank->plan.shares();
          const std::int64_t own = shares.cpu + shares.streamed + shares.resident;
          EXPECT_NEAR(static_cast<double>(own), static_cast<double>(run.layout.parameter_count()) / ranks,
                      static_cast<double>(run.layout.parameter_count()) / 20)
              << policy;
          updated += own;
          EXPECT_LE(of_rank->planned_device_bytes(), run.planned_device_bytes()) << policy;
        }
        EXPECT_GE(updated, run.layout.parameter_count()) << policy;  // ends of slices are padded
        EXPECT_LE(updated, run.layout.parameter_count() * 101 / 100) << policy;
        EXPECT_THAT(run.table(), HasSubstr(std::to_string(ranks) + " devices, each as above")) << policy;
      }
    }
  }
}

TEST(RunSetupOfRanks, MicroBatchesThatHaveNoEqualPartsAreRefused) {
  for (const auto& [ranks, grad_accum] : {std::pair(2, 1), {2, 3}, {3, 4}, {3, 2}}) {
    TrainConfig config = config_of(ranks);
    config.grad_accum = grad_accum;
    try {
      static_cast<void>(set_up_ranks(config, machine_with(64_GiB)));
      ADD_FAILURE() << ranks << " share " << grad_accum;
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), HasSubstr("--grad-accum " + std::to_string(grad_accum) + ":"));
      EXPECT_THAT(error.what(), HasSubstr("use a multiple of " + std::to_string(ranks)));
    }
  }
  TrainConfig config = config_of(3);
  EXPECT_EQ(config_of_rank(config).grad_accum, 2);
  config.device = "cuda:0,cuda:1";  // without opening one
  EXPECT_EQ(config_of_rank(config).grad_accum, 3);
}

TEST(RunSetupOfRanks, WhatDoesNotTrainTakesOneDevice) {
  const ModelConfig model = builtin_model("tiny-llama");
  EXPECT_NO_THROW(set_up_run(config_of(1), model, {.training = false, .predicts = false}));
  EXPECT_THROW(set_up_run(config_of(2), model, {.training = false, .predicts = false}), UsageError);
}

TEST(RunSetupOfRanks, HostMemoryIsOfAllAndTheTableSaysSo) {
  const std::vector<char> held(8 * unlike_of_rank, 'x');  // by the program
  for (const std::int64_t every : {0, 10}) {
    TrainConfig config = config_of(1);
    config.checkpoint_every = every;
    const RunSetup one = set_up_ranks(config, machine_with(64_GiB));
    EXPECT_GE(bytes_of(one.memory, "program and libraries"), held.size());
    for (const int ranks : {2, 3}) {
      config.device = config_of(ranks).device;
      const RunSetup run = set_up_ranks(config, machine_with(64_GiB));
      std::size_t sum = 0;
      for (const RunSetup* of_rank : all_of(run)) sum += of_rank->memory.host_bytes();
      EXPECT_EQ(run.planned_host_bytes(), sum);
      EXPECT_EQ(run.all_memory().host_bytes(), sum);
      // The process is one, whose own memory is counted once; its state is divided.
      EXPECT_NEAR(static_cast<double>(bytes_of(run.all_memory(), "program and libraries")),
                  static_cast<double>(bytes_of(one.memory, "program and libraries")),
                  static_cast<double>(unlike_of_rank));
      EXPECT_NEAR(static_cast<double>(bytes_of(run.all_memory(), "optimizer")),
                  static_cast<double>(bytes_of(one.memory, "optimizer")), static_cast<double>(1_MiB));
      EXPECT_THAT(run.table(), HasSubstr(format_bytes(sum)));
    }
  }
}

// Rounded up for each rank.
TEST(RunSetupOfRanks, ACopyOfTheStateIsBookedWhole) {
  for (const int ranks : {2, 3}) {
    TrainConfig config = config_of(ranks);
    config.checkpoint_every = 10;
    const RunSetup run = set_up_ranks(config, machine_with(64_GiB));
    ASSERT_TRUE(run.saving.copies);
    const std::size_t copy = StateCopy::bytes(run.layout, Optimizer::adamw);
    EXPECT_GE(bytes_of(run.all_memory(), "checkpoint copy"), copy);
    EXPECT_LE(bytes_of(run.all_memory(), "checkpoint copy"), copy + 1_KiB);
    EXPECT_EQ(bytes_of(run.all_memory(), "checkpoint buffer"), 0U);
    // A ceiling between both has room for the buffer, and not for the copy.
    config.host_memory = run.planned_host_bytes() - copy / 2;
    const RunSetup without = set_up_ranks(config, machine_with(64_GiB));
    EXPECT_FALSE(without.saving.copies);
    EXPECT_EQ(bytes_of(without.all_memory(), "checkpoint copy"), 0U);
    EXPECT_GT(bytes_of(without.all_memory(), "checkpoint buffer"), 0U);
    EXPECT_LE(without.planned_host_bytes(), config.host_memory);
    config.host_memory = run.planned_host_bytes() + unlike_of_rank;
    EXPECT_TRUE(set_up_ranks(config, machine_with(64_GiB)).saving.copies);
  }
}

TEST(RunSetupOfRanks, TheAdvisedCeilingOfHostMemoryFitsAll) {
  for (const int ranks : {2, 3}) {
    TrainConfig config = config_of(ranks);
    for (const std::size_t ceiling : {1_MiB, 40_MiB}) {
      config.host_memory = ceiling;
      const std::string text = refusal_of_ranks(config, machine_with(64_GiB));
      EXPECT_THAT(text, HasSubstr("the ceiling is " + format_bytes(ceiling)));
      config.host_memory = advised_host_memory(text);
      const RunSetup run = set_up_ranks(config, machine_with(64_GiB));
      EXPECT_LE(run.planned_host_bytes(), config.host_memory);
      EXPECT_GT(run.planned_host_bytes() + unlike_of_rank, config.host_memory) << "no more is asked for than is needed";
    }
  }
}

// Host devices are of the memory that the machine has for all.
TEST(RunSetupOfRanks, WhatAMachineHasIsForAllOfThem) {
  for (const char* policy : {"auto", "host"}) {
    for (const int ranks : {2, 3}) {
      const TrainConfig config = config_of(ranks, policy);
      const std::size_t at_will = bytes_of_all(set_up_ranks(config, machine_with(64_GiB)));
      bool refused = false;
      for (std::size_t available = at_will + unlike_of_rank; !refused; available -= at_will / 32) {
        ASSERT_GT(available, at_will / 32) << "nothing is refused";
        try {
          const RunSetup run = set_up_ranks(config, machine_with(available));
          EXPECT_LE(bytes_of_all(run) - bytes_of(run.all_memory(), "program and libraries"), available) << policy;
        } catch (const PlanError& error) {
          EXPECT_THAT(error.what(), HasSubstr("is available")) << policy;
          EXPECT_LT(available, at_will) << policy;
          refused = true;
        }
      }
    }
  }
}

}  // namespace
}  // namespace tandem
