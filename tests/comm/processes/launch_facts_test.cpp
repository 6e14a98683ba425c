// Environments of launchers, and the place that a process has by them; each that makes no sense is one line that says
// what to set.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "comm/launch_facts.hpp"
#include "core/base/error.hpp"

namespace tandem {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

using Set = std::map<std::string, std::string, std::less<>>;

std::optional<LaunchFacts> facts_of(const Set& variables) {
  return launch_facts([&](std::string_view name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

Set with(Set variables, const Set& more) {
  for (const auto& [name, value] : more) variables[name] = value;
  return variables;
}

Set without(Set variables, const std::string& name) {
  variables.erase(name);
  return variables;
}

const Set plain = {{"RANK", "5"},
                   {"WORLD_SIZE", "8"},
                   {"LOCAL_RANK", "1"},
                   {"MASTER_ADDR", "10.0.0.1"},
                   {"MASTER_PORT", "29400"},
                   {"TANDEM_TOKEN", "secret"}};

TEST(LaunchFactsOf, ALaunchByHand) {
  EXPECT_EQ(facts_of(plain), (LaunchFacts{{5, 8}, 1, "10.0.0.1", 29400, "secret"}));
  EXPECT_EQ(facts_of(without(plain, "MASTER_PORT"))->port, default_launch_port);
}

TEST(LaunchFactsOf, TorchrunLeaveItsAgentThePort) {
  const Set torchrun = with(plain, {{"TORCHELASTIC_USE_AGENT_STORE", "True"}, {"LOCAL_WORLD_SIZE", "4"}});
  EXPECT_EQ(facts_of(torchrun)->port, 29401);
  EXPECT_EQ(facts_of(with(torchrun, {{"MASTER_PORT", "65535"}}))->port, 65534);
  EXPECT_EQ(facts_of(with(torchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "False"}}))->port, 29400);
}

TEST(LaunchFactsOf, MpirunOnOneMachine) {
  const Set open_mpi = {{"OMPI_COMM_WORLD_SIZE", "2"},
                        {"OMPI_COMM_WORLD_RANK", "1"},
                        {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                        {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                        {"TANDEM_TOKEN", "secret"}};
  const LaunchFacts expected{{1, 2}, 1, "127.0.0.1", default_launch_port, "secret"};
  EXPECT_EQ(facts_of(open_mpi), expected);
  const Set mpich = {{"PMI_SIZE", "2"}, {"PMI_RANK", "1"}, {"MPI_LOCALNRANKS", "2"}, {"TANDEM_TOKEN", "secret"}};
  EXPECT_EQ(facts_of(mpich), expected);
  EXPECT_EQ(facts_of(with(plain, open_mpi))->rank, (Rank{5, 8})) << "RANK and WORLD_SIZE come first";
}

TEST(LaunchFactsOf, Srun) {
  const Set srun = {{"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_PROCID", "3"},     {"SLURM_LOCALID", "1"},
                    {"SLURM_STEP_NUM_NODES", "2"}, {"MASTER_ADDR", "node-1"}, {"TANDEM_TOKEN", "secret"}};
  EXPECT_EQ(facts_of(srun), (LaunchFacts{{3, 4}, 1, "node-1", default_launch_port, "secret"}));
  const Set one_node = with(without(srun, "MASTER_ADDR"), {{"SLURM_STEP_NUM_NODES", "1"}});
  EXPECT_EQ(facts_of(one_node)->host, "127.0.0.1");
}

TEST(LaunchFactsOf, OneProcessAreNone) {
  EXPECT_EQ(facts_of({}), std::nullopt);
  EXPECT_EQ(facts_of({{"WORLD_SIZE", "1"}, {"RANK", "0"}}), std::nullopt);
  EXPECT_EQ(facts_of({{"LOCAL_RANK", "0"}, {"MASTER_ADDR", "10.0.0.1"}, {"TANDEM_TOKEN", "secret"}}), std::nullopt);
  // A script of sbatch, outside of srun.
  EXPECT_EQ(facts_of({{"SLURM_NTASKS", "4"}, {"SLURM_PROCID", "0"}}), std::nullopt);
}

auto says(const std::string& text) { return ThrowsMessage<UsageError>(HasSubstr(text)); }

TEST(LaunchFactsOf, HalfALaunchAreRefused) {
  EXPECT_THAT(
      [] {
        facts_of({{"WORLD_SIZE", "2"}});
      },
      says("WORLD_SIZE is set without RANK; let the launcher set both"));
  EXPECT_THAT([] { facts_of({{"RANK", "0"}}); }, says("RANK is set without WORLD_SIZE"));
  EXPECT_THAT([] { facts_of({{"WORLD_SIZE", "2"}, {"RANK", ""}}); }, says("WORLD_SIZE is set without RANK"));
  EXPECT_THAT([] { facts_of(without(plain, "LOCAL_RANK")); }, says("RANK is set without LOCAL_RANK"));
  EXPECT_THAT(
      [] { facts_of(without(plain, "TANDEM_TOKEN")); },
      ThrowsMessage<UsageError>(AllOf(HasSubstr("TANDEM_TOKEN is not set"), HasSubstr("openssl rand -hex 16"))));
  EXPECT_THAT([] { facts_of(without(plain, "MASTER_ADDR")); }, says("run export MASTER_ADDR=ADDRESS"));
  EXPECT_THAT(
      [] {
        facts_of(with(without(plain, "MASTER_ADDR"), {{"SLURM_JOB_NODELIST", "n[1-2]"}}));
      },
      says("MASTER_ADDR=$(scontrol show hostnames"));
  for (const char* const every : {"0.0.0.0", "::"}) {
    EXPECT_THAT(
        [&] {
          facts_of(with(plain, {{"MASTER_ADDR", every}}));
        },
        says("that is no address by which others find rank 0; set it to an address of rank 0's machine"));
  }
}

TEST(LaunchFactsOf, NumbersThatAreNoneAreRefused) {
  EXPECT_THAT([] { facts_of(with(plain, {{"RANK", "8"}})); }, says("RANK is '8': not a number from 0 to 7"));
  EXPECT_THAT([] { facts_of(with(plain, {{"RANK", "-1"}})); }, says("RANK is '-1'"));
  EXPECT_THAT([] { facts_of(with(plain, {{"WORLD_SIZE", "8 "}})); }, says("WORLD_SIZE is '8 '"));
  EXPECT_THAT([] { facts_of(with(plain, {{"WORLD_SIZE", "99999999999"}})); }, says("WORLD_SIZE is '9"));
  EXPECT_THAT([] { facts_of(with(plain, {{"MASTER_PORT", "70000"}})); }, says("MASTER_PORT is '70000'"));
  EXPECT_THAT([] { facts_of(with(plain, {{"LOCAL_RANK", "6"}})); }, says("LOCAL_RANK is '6'"));
}

}  // namespace
}  // namespace tandem
