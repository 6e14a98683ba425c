// Another plan in the middle of a group's training, on all of its ranks: no bit changes, and either all take theirs or
// none does.
#include <gtest/gtest.h>

#include <ostream>

#include "core/base/error.hpp"
#include "tests/offload/ranks/toy_group.hpp"

namespace tandem {
namespace {

using testing::toy;
using testing::ToyOptions;
using testing::ToyResult;
using testing::ToyTrainer;
using testing::with_toy_group;

/// Room for any plan of the toy.
ToyOptions roomy(const std::string& policy, int micro_batches) {
  ToyOptions o = toy(policy);
  o.frozen_ends = true;
  o.steps = 5;
  o.micro_batches = micro_batches;
  o.offload.spare_device_memory = std::size_t{8} << 20;
  o.offload.spare_host_memory = std::size_t{8} << 20;
  return o;
}

struct Change {
  const char* from;
  const char* to;
  int resident;
  std::int64_t subgroup_size;
};

void PrintTo(const Change& c, std::ostream* out) {
  *out << c.from << " to " << c.to << ", " << c.resident << " resident, subgroups of " << c.subgroup_size;
}

/// Makes another plan for a rank's engine.
Plan another_plan(ToyTrainer& t, const ToyOptions& o, const Change& change, Rank rank) {
  OffloadOptions options = o.offload;
  options.policy = parse_policy(change.to);
  options.resident_layers = std::string(change.to) == "device" ? std::nullopt : std::optional(change.resident);
  options.subgroup_size = change.subgroup_size > 0 ? std::optional(change.subgroup_size) : std::nullopt;
  options.max_micro_batches = t.engine().plan().max_micro_batches;
  options.micro_batches_at_once = t.engine().plan().micro_batches_at_once;
  options.rank = rank;
  return make_plan(t.layout(), options, {o.device.capacity, 0});
}

Plan another_plan(ToyTrainer& t, const ToyOptions& o, const Change& change) {
  return another_plan(t, o, change, t.engine().group()->rank());
}

class AdoptingRanks : public ::testing::TestWithParam<Change> {};

void expect_no_trace(ToyOptions o, int ranks) {
  const ToyResult straight = testing::train_toy(o);
  with_toy_group(o, ranks, [&](ToyTrainer& t, int rank) {
    const Plan first = t.engine().plan();
    const Plan second = another_plan(t, o, AdoptingRanks::GetParam());
    ToyResult result;
    for (int s = 0; s < o.steps; ++s) {
      if (s > 0) t.engine().adopt(s % 2 == 1 ? second : first);
      EXPECT_EQ(t.engine().plan().json(), s % 2 == 1 ? second.json() : first.json());
      t.step(s, result);
      if (o.evaluate_between) t.evaluate();
    }
    EXPECT_EQ(t.engine().state_digest(), straight.digest) << "rank " << rank << " of " << ranks;
    EXPECT_EQ(result.norms, straight.norms);
  });
}

TEST_P(AdoptingRanks, LeavesNoTraceInAnyFormat) {
  int ranks = 2;
  for (const StateFormat state : state_formats) {
    ToyOptions o = roomy(GetParam().from, ranks);
    o.offload.state = state;
    expect_no_trace(o, ranks);
    ranks = 5 - ranks;
  }
}

TEST_P(AdoptingRanks, LeavesNoTraceWithAccumulationAndEvaluations) {
  ToyOptions o = roomy(GetParam().from, 6);
  o.evaluate_between = true;
  expect_no_trace(o, 2);
}

// More ranks than some layers have blocks: some own nothing there, in however many subgroups.
TEST_P(AdoptingRanks, LeavesNoTraceWhereRanksOwnNothingOfALayer) {
  ToyOptions o = roomy(GetParam().from, 9);
  o.steps = 3;
  expect_no_trace(o, 9);
}

INSTANTIATE_TEST_SUITE_P(Plans, AdoptingRanks,
                         ::testing::Values(Change{"host", "device", -1, 0}, Change{"device", "host", 0, 2048},
                                           Change{"host", "stream", 2, 4097}, Change{"stream", "host", 0, 1},
                                           Change{"interleave:2", "interleave:3,resident=0.4", 3, 1 << 20},
                                           Change{"static:0.3", "static:0.7", 1, 3000},
                                           Change{"interleave:2,resident=0.4", "device", -1, 5000}));

/// All are refused by `E`, and go on as if nobody had asked.
template <class E>
void expect_refusal(const ToyOptions& o, const std::function<Plan(ToyTrainer&, int rank)>& plan) {
  const ToyResult straight = testing::train_toy(o);
  with_toy_group(o, 3, [&](ToyTrainer& t, int rank) {
    ToyResult result;
    for (int s = 0; s < o.steps; ++s) {
      const std::string before = t.engine().plan().json();
      EXPECT_THROW(t.engine().adopt(plan(t, rank)), E) << "rank " << rank;
      EXPECT_EQ(t.engine().plan().json(), before);
      t.step(s, result);
    }
    EXPECT_EQ(t.engine().state_digest(), straight.digest) << "rank " << rank;
  });
}

TEST(AdoptByRanks, IsRefusedToAllWhereOneHasThePlanOfAnother) {
  const ToyOptions o = roomy("host", 3);
  const Change change{"host", "device", -1, 0};
  expect_refusal<MisuseError>(o, [&](ToyTrainer& t, int rank) {
    return another_plan(t, o, change, {rank == 1 ? 2 : rank, 3});
  });
}

TEST(AdoptByRanks, IsRefusedToAllWherePlansAreNotOfOneKind) {
  const ToyOptions o = roomy("host", 3);
  expect_refusal<MisuseError>(o, [&](ToyTrainer& t, int rank) {
    return another_plan(t, o, {"host", "host", rank == 2 ? 1 : 3, 0});
  });
}

TEST(AdoptByRanks, IsRefusedToAllWhereOneHasNoRoom) {
  const ToyOptions o = roomy("host", 3);
  expect_refusal<PlanError>(o, [&](ToyTrainer& t, int rank) {
    Plan plan = another_plan(t, o, {"host", "host", 3, 0});
    if (rank == 1) plan.memory.add("too much", "run", Place::device, std::size_t{16} << 20);
    return plan;
  });
}

// Where ranks divide their own share of the work otherwise, they exchange the same.
TEST(AdoptByRanks, MayDivideTheWorkOtherwiseOnEach) {
  const ToyOptions o = roomy("host", 2);
  const ToyResult straight = testing::train_toy(o);
  with_toy_group(o, 2, [&](ToyTrainer& t, int rank) {
    ToyResult result;
    for (int s = 0; s < o.steps; ++s) {
      t.engine().adopt(another_plan(t, o, {"", (s + rank) % 2 == 0 ? "static:0.3" : "static:0.8", 0, 1024}));
      t.step(s, result);
    }
    EXPECT_EQ(t.engine().state_digest(), straight.digest) << "rank " << rank;
  });
}

}  // namespace
}  // namespace tandem
