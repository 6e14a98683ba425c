// Prediction of what a save costs the steps beside it.
#include "train/saving/save_prediction.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "offload/engine/state_io.hpp"
#include "scheduler/simulation/simulator.hpp"
#include "train/saving/save_pace.hpp"

namespace tandem {
namespace {

constexpr int layers = 6;

Figure assumed(double value) { return {value, 0.0, "assumed"}; }

/// Made of its host's two cores, as the host device is.
MachineProfile machine() {
  MachineProfile p;
  p.devices = assumed(1);
  p.cores = assumed(2);
  p.device_threads = assumed(2);
  p.matmul = assumed(1e11);
  p.attention = assumed(1e11);
  p.device_bandwidth = assumed(2e10);
  p.device_update = assumed(1e9);
  p.to_device = p.to_host = assumed(1e10);
  p.both_ways = assumed(2e10);
  p.copy_dram = assumed(1);
  p.dram = assumed(2e11);
  p.host_stream = assumed(2e10);
  p.cpu_update = assumed(1e9);
  p.cpu_update_cores = assumed(2);
  p.cpu_update_bytes = assumed(28);
  p.disk = assumed(1e6);
  p.disk_cores = assumed(0.5);
  return p;
}

struct Training {
  ParameterLayout layout;
  Plan plan;
  std::vector<LayerSeconds> compute{layers, {0.1, 0.2}};
  MachineProfile profile = machine();

  explicit Training(const char* policy = "device") {
    for (int i = 0; i < layers; ++i) layout.add_layer(std::to_string(i)).add("w", {1024, 1024});
    OffloadOptions options;
    options.policy = parse_policy(policy);
    plan = make_plan(layout, options, {std::size_t{1} << 40, 0});
  }
  SimulationOptions options(double disk_share) const {
    return {.micro_batches = plan.max_micro_batches, .disk_share = disk_share};
  }
  double step(double disk_share = 0.0) const {
    return simulate(layout, plan, profile, compute, options(disk_share)).step_seconds;
  }
  double full_speed() const {
    return static_cast<double>(StateCopy::bytes(layout, Optimizer::adamw)) / profile.disk.value;
  }
  SaveSlowdown predict(const Saving& how, double disk = 0.0) const {
    return predict_saving(how, layout, plan, profile, compute, disk).value();
  }
};

TEST(SavePrediction, NobodyKnowsWithoutTheDisk) {
  Training run;
  run.profile.disk.value = 0.0;
  for (const bool copies : {true, false}) {
    const Saving how{.every = 100, .copies = copies};
    EXPECT_FALSE(predict_saving(how, run.layout, run.plan, run.profile, run.compute));
    EXPECT_TRUE(predict_saving(how, run.layout, run.plan, run.profile, run.compute, 1e6));
  }
}

TEST(SavePrediction, ACopyIsWrittenAtItsShareWhereThereIsTime) {
  const Training run;
  const SaveSlowdown far = run.predict({.every = 1000, .copies = true});
  const double beside = run.step(SavePace::busy_share);
  const double writing = run.full_speed() / SavePace::busy_share;
  EXPECT_EQ(far.steps, 1 + static_cast<int>(std::ceil(writing / beside))) << "one step more while it is copied";
  // Copying takes a core for 8 ms of the first step; the disk takes an eighth of a core beside all others.
  EXPECT_GT(far.factor, 1.0);
  EXPECT_NEAR(far.factor, beside / run.step(), 0.01);
}

TEST(SavePrediction, TheSoonerTheNextSaveTheFasterAndTheMoreItCosts) {
  const Training run;
  double factor = run.predict({.every = 1000, .copies = true}).factor;
  const double alone = run.full_speed() / run.step();
  for (const double interval : {3.0, 2.0, 1.2}) {
    const auto every = static_cast<std::int64_t>(std::lround(interval * alone / (1.0 - SaveInterval::spare)));
    const SaveSlowdown near = run.predict({.every = every, .copies = true});
    EXPECT_LE(near.steps, every);
    EXPECT_GT(near.factor, factor) << every;
    factor = near.factor;
  }
  EXPECT_LE(run.predict({.every = 1, .copies = true}).steps, 1) << "the next save waits for the rest of it";
}

TEST(SavePrediction, CopyingAndWritingShareTheTimeToTheNextSave) {
  Training run;
  run.profile.pageable_to_host = assumed(1e7);  // copying lasts for several steps
  const double alone = run.full_speed() / run.step();
  const double usable = 1.0 - SaveInterval::spare;
  const auto every = static_cast<std::int64_t>(std::lround(2.0 * alone / usable));
  const SaveSlowdown save = run.predict({.every = every, .copies = true});
  // In steps of training alone; the last one is written beside in part.
  EXPECT_NEAR(save.steps * save.factor, usable * static_cast<double>(every), 1.5);
}

TEST(SavePrediction, WithoutACopyTheDiskHoldsTheUpdates) {
  const Training run("host");
  const Saving how{.every = 1000, .copies = false};
  const SimulationOptions saving{.micro_batches = run.plan.max_micro_batches, .save = true};
  const Simulation beside = simulate(run.layout, run.plan, run.profile, run.compute, saving);
  EXPECT_EQ(run.predict(how).steps, beside.steps);
  EXPECT_DOUBLE_EQ(run.predict(how).factor, beside.step_seconds / run.step());
  EXPECT_GT(run.predict(how, run.profile.disk.value / 10.0).factor, run.predict(how).factor);
}

TEST(SavePrediction, IsTold) {
  EXPECT_EQ(Saving{}.text(), "");
  Saving how{.every = 20, .copies = true};
  EXPECT_EQ(how.text(), "saving every 20 steps, from a copy of the state, written while steps go on\n");
  how.slowdown = {1.0625, 12};
  EXPECT_EQ(how.text(),
            "saving every 20 steps, from a copy of the state, written while steps go on, predicted step 1.06 x for 12 "
            "steps\n");
  EXPECT_EQ((Saving{.every = 1, .copies = false}.text()),
            "saving every 1 step, beside training: an update waits until its state is read (not predicted: the disk's "
            "rate is unknown)\n");
}

}  // namespace
}  // namespace tandem
