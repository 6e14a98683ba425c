// Open-ended steps and absent gradients of several ranks: the bits of one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "core/base/error.hpp"
#include "tests/offload/ranks/toy_group.hpp"
#include "tests/offload/some_absent.hpp"

namespace tandem {
namespace {

using testing::run_toy_group;
using testing::some_absent;
using testing::toy;
using testing::ToyOptions;
using testing::ToyTrainer;
using testing::train_toy_group;

/// Steps of two micro-batches on each of so many ranks, of which the plan allows three.
ToyOptions open_steps(const char* policy, int ranks) {
  ToyOptions o = toy(policy);
  o.steps = 4;
  o.micro_batches = 2 * ranks;
  o.offload.max_micro_batches = 3;
  o.says = ToyOptions::Says::begin;
  o.begin = [](StepOptions& options) {
    options.micro_batches = 3;
    options.open_ended = true;
    options.absent = Absent::skip;
  };
  o.absent = some_absent;
  return o;
}

class RanksWithAbsentGradients : public ::testing::TestWithParam<const char*> {};

TEST_P(RanksWithAbsentGradients, GiveTheBitsOfOne) {
  for (const Absent absent : {Absent::zero, Absent::skip}) {
    ToyOptions one = open_steps("device", 2);
    one.offload.max_micro_batches = 6;
    one.absent = [](int step, int micro, const Parameter& p) { return some_absent(step, micro / 2, p); };
    one.begin = [absent](StepOptions& options) { options.absent = absent; };
    const std::string expected = train_toy(one).digest;
    ToyOptions o = open_steps(GetParam(), 2);
    for (const bool in_file : {false, true}) {
      if (in_file && std::string(GetParam()) != "interleave:2") continue;
      if (in_file) o = testing::with_state_in_files(o, 2, 0.5);
      o.begin = [absent](StepOptions& options) {
        options.micro_batches = 3;
        options.open_ended = true;
        options.absent = absent;
      };
      for (const auto& result : train_toy_group(o, 2)) EXPECT_EQ(result.digest, expected) << in_file;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Policies, RanksWithAbsentGradients,
                         ::testing::Values("device", "host", "stream", "static:0.5", "interleave:2"));

TEST(RanksAbsent, OtherParametersOnOtherRanksEndTheGroup) {
  ToyOptions o = open_steps("host", 1);
  const auto failures = run_toy_group(
      2,
      [&](int rank) {
        ToyOptions own = o;
        own.absent = [rank](int, int, const Parameter& p) { return rank == 1 && p.full_name == "h.1.b"; };
        return own;
      },
      [](ToyTrainer& t, int) { t.run(); });
  ASSERT_TRUE(failures[0] && failures[1]);
  EXPECT_THROW(std::rethrow_exception(failures[0]), PeerError);
  try {
    std::rethrow_exception(failures[1]);
  } catch (const MisuseError& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("rank 1 has gradients of other parameters than rank 0"));
  }
}

}  // namespace
}  // namespace tandem
