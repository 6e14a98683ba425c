// Another plan in the middle of training, on the same memory: no bit changes.
#include <gtest/gtest.h>

#include <ostream>

#include "core/base/error.hpp"
#include "tests/offload/toy/trainer.hpp"

namespace tandem {
namespace {

using testing::toy;
using testing::ToyOptions;
using testing::ToyResult;
using testing::ToyTrainer;

/// Room for any plan of the toy.
ToyOptions roomy(const std::string& policy) {
  ToyOptions o = toy(policy);
  o.frozen_ends = true;
  o.steps = 6;
  o.offload.spare_device_memory = std::size_t{8} << 20;
  o.offload.spare_host_memory = std::size_t{8} << 20;
  return o;
}

Plan another_plan(const ToyOptions& o, const std::string& policy, int resident, std::int64_t subgroup_size) {
  OffloadOptions options = o.offload;
  options.policy = parse_policy(policy);
  options.resident_layers = policy == "device" ? std::nullopt : std::optional(resident);
  options.subgroup_size = subgroup_size > 0 ? std::optional(subgroup_size) : std::nullopt;
  options.max_micro_batches = std::max(options.max_micro_batches, o.micro_batches);
  return make_plan(testing::toy_layout(o), options, {o.device.capacity, 0});
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

class Adopting : public ::testing::TestWithParam<Change> {};

void expect_no_trace(ToyOptions o, const Change& change) {
  o.offload.policy = parse_policy(change.from);
  const ToyResult straight = testing::train_toy(o);
  ToyTrainer trainer(o);
  const Plan first = trainer.engine().plan();
  const Plan second = another_plan(o, change.to, change.resident, change.subgroup_size);
  ToyResult result;
  for (int s = 0; s < o.steps; ++s) {
    if (s > 0) trainer.engine().adopt(s % 2 == 1 ? second : first);
    EXPECT_EQ(trainer.engine().plan().json(), s % 2 == 1 ? second.json() : first.json());
    trainer.step(s, result);
  }
  EXPECT_EQ(trainer.engine().state_digest(), straight.digest);
  EXPECT_EQ(result.norms, straight.norms);
  EXPECT_EQ(result.losses, straight.losses);
}

TEST_P(Adopting, LeavesNoTraceInAnyFormat) {
  for (const StateFormat state : state_formats) {
    ToyOptions o = roomy(GetParam().from);
    o.offload.state = state;
    expect_no_trace(o, GetParam());
  }
}

TEST_P(Adopting, LeavesNoTraceWhereUpdatesRunBeforeTheNormIsKnown) {
  ToyOptions o = roomy(GetParam().from);
  o.offload.speculate = Speculate::on;
  for (const double limit : {1.0, 1e9}) {
    o.max_grad_norm = limit;
    expect_no_trace(o, GetParam());
  }
}

TEST_P(Adopting, LeavesNoTraceWithAccumulationAndEvaluations) {
  ToyOptions o = roomy(GetParam().from);
  o.micro_batches = 3;
  o.evaluate_between = true;
  expect_no_trace(o, GetParam());
}

INSTANTIATE_TEST_SUITE_P(Plans, Adopting,
                         ::testing::Values(Change{"host", "device", -1, 0}, Change{"device", "host", 0, 2048},
                                           Change{"host", "stream", 2, 4097}, Change{"stream", "host", 0, 1},
                                           Change{"interleave:2", "interleave:3,resident=0.4", 3, 1 << 20},
                                           Change{"static:0.3", "static:0.7", 1, 3000},
                                           Change{"interleave:2,resident=0.4", "device", -1, 5000}));

TEST(Adopt, KeepsTheEngineAsItWasWhereThePlanDoesNotFit) {
  ToyOptions o = toy("host");
  ToyTrainer trainer(o);
  const std::string before = trainer.engine().state_digest();
  EXPECT_THROW(trainer.engine().adopt(another_plan(o, "device", -1, 0)), PlanError);
  ToyOptions wider = o;
  wider.width = 4000;
  EXPECT_THROW(trainer.engine().adopt(another_plan(wider, "host", 0, 0)), MisuseError);
  ToyOptions split = o;
  split.offload.state = StateFormat::split;
  EXPECT_THROW(trainer.engine().adopt(another_plan(split, "host", 0, 0)), MisuseError);
  trainer.engine().begin_step({});
  EXPECT_THROW(trainer.engine().adopt(trainer.engine().plan()), MisuseError);
  trainer.engine().abort_step();
  EXPECT_EQ(trainer.engine().state_digest(), before);
}

TEST(Adopt, RefusesToGoOnWithStateThatWasLostOnItsWay) {
  if (!testing::takes_faults()) GTEST_SKIP() << "this device takes no faults";
  ToyOptions o = roomy("host");
  o.device.faults = std::make_shared<HostFaults>();
  ToyTrainer trainer(o);
  o.device.faults->before_task = [](std::string_view stream, std::string_view) {
    if (stream == "relocation") throw DeviceError("injected failure");
  };
  EXPECT_THROW(trainer.engine().adopt(another_plan(o, "device", -1, 0)), DeviceError);
  EXPECT_THROW(trainer.engine().state_digest(), TrainingError);
  EXPECT_THROW(trainer.engine().begin_step({}), TrainingError);
}

}  // namespace
}  // namespace tandem
