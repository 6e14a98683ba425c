// Whatever is slow, under whatever plan: the same bits, and nothing hangs. Each run draws its plan and its delays from
// its number; TANDEM_DELAYED_RUNS of them for each shard, 20 where it is not set.
#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <string>

#include "tests/offload/draw.hpp"
#include "tests/offload/toy/trainer.hpp"

namespace tandem {
namespace {

using testing::Draw;
using testing::toy;
using testing::ToyOptions;
using testing::ToyResult;
using testing::train_toy;

constexpr int shards = 10;

/// Draws the options that the bits depend on.
ToyOptions drawn_work(Draw& draw) {
  ToyOptions o = toy("device");
  o.steps = 2;
  o.micro_batches = draw.one_in(2) ? 1 : 3;
  o.frozen_ends = draw.one_in(4);
  if (draw.one_in(4)) {  // updates in backward
    o.max_grad_norm = 0.0;
    o.offload.on_nonfinite = OnNonfinite::stop;
  }
  return o;
}

/// Draws the options that the bits do not depend on.
void draw_plan(Draw& draw, ToyOptions& o) {
  constexpr std::array policies{"host",         "static:0.3",   "static:0.7",
                                "interleave:2", "interleave:3", "interleave:2,resident=0.4",
                                "stream",       "auto",         "device"};
  const std::string policy = draw.of(policies);
  o.offload.policy = parse_policy(policy);
  o.offload.prefetch_layers = 1 + draw.below(4);
  o.offload.subgroup_size = 1 + 1500 * draw.below(6);
  const auto resident = static_cast<int>(draw.below(7)) - 1;
  if (policy != "device" && resident >= 0) o.offload.resident_layers = resident;
  if (draw.one_in(4)) o.offload.state = StateFormat::split;
  if (draw.one_in(3)) o.offload.speculate = Speculate::on;
  o.offload.overlap = !draw.one_in(8);
  o.at_once = 1 + draw.below(o.micro_batches);
  o.evaluate_between = draw.one_in(4);
}

/// One stream is slow, or all are: each task of it waits a random time.
void draw_delays(Draw& draw, ToyOptions& o) {
  constexpr std::array streams{"host to device", "device to host", "device update", "compute", "all"};
  const std::string slow = draw.of(streams);
  const auto delay = testing::drawn_delay(draw, slow);
  o.device.faults = std::make_shared<HostFaults>();
  o.device.faults->before_task = [delay](std::string_view stream, std::string_view) { delay(stream); };
}

class Delays : public ::testing::TestWithParam<int> {};

TEST_P(Delays, ChangeNoBitUnderAnyPlan) {
  for (int run = 0; run < testing::delayed_runs(20); ++run) {
    const auto seed = static_cast<unsigned>(run * shards + GetParam());
    Draw draw(seed);
    ToyOptions o = drawn_work(draw);
    const ToyResult& expected = testing::reference_of(o);
    draw_plan(draw, o);
    draw_delays(draw, o);
    const ToyResult result = train_toy(o);
    ASSERT_EQ(result.digest, expected.digest) << "run " << seed << ", " << result.plan.policy.text();
    ASSERT_EQ(result.norms, expected.norms) << "run " << seed;
    ASSERT_EQ(result.losses, expected.losses) << "run " << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(All, Delays, ::testing::Range(0, shards));

}  // namespace
}  // namespace tandem
