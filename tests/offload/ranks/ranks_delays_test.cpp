// Whatever is slow on whichever rank: the bits of one, and nothing hangs. Each run draws its plan and its delays from
// its number; TANDEM_DELAYED_RUNS of them for each shard, 6 where it is not set.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <string>

#include "tests/offload/draw.hpp"
#include "tests/offload/ranks/toy_group.hpp"

namespace tandem {
namespace {

using testing::Draw;
using testing::toy;
using testing::ToyOptions;
using testing::ToyResult;
using testing::ToyTrainer;

constexpr int rank_shards = 8;

/// Draws the options that the bits depend on: micro-batches of all ranks.
ToyOptions drawn_work(Draw& draw, int ranks) {
  ToyOptions o = toy("device");
  o.steps = 2;
  o.micro_batches = ranks * (1 + draw.below(2));
  o.frozen_ends = draw.one_in(4);
  if (draw.one_in(4)) {  // updates in backward
    o.max_grad_norm = 0.0;
    o.offload.on_nonfinite = OnNonfinite::stop;
  }
  return o;
}

/// Draws the options that the bits do not depend on.
void draw_plan(Draw& draw, ToyOptions& o, int ranks) {
  constexpr std::array policies{"host",   "static:0.3", "interleave:2", "interleave:3", "interleave:2,resident=0.4",
                                "stream", "device"};
  const std::string policy = draw.of(policies);
  o.offload.policy = parse_policy(policy);
  o.offload.prefetch_layers = 1 + draw.below(4);
  o.offload.subgroup_size = 1 + 1500 * draw.below(4);
  const auto resident = static_cast<int>(draw.below(7)) - 1;
  if (policy != "device" && resident >= 0) o.offload.resident_layers = resident;
  if (draw.one_in(4)) o.offload.state = StateFormat::split;
  o.offload.overlap = !draw.one_in(8);
  o.at_once = 1 + draw.below(o.micro_batches / ranks);
  o.evaluate_between = draw.one_in(4);
}

/// One stream of a rank is slow, or its updates are, or all: each task of it waits a random time.
std::shared_ptr<HostFaults> drawn_delays(Draw& draw) {
  constexpr std::array slow_ones{
      "host to device", "device to host", "device update", "compute", "peers", "updates", "all"};
  const std::string slow = draw.of(slow_ones);
  const auto delay = testing::drawn_delay(draw, slow);
  auto faults = std::make_shared<HostFaults>();
  faults->before_task = [delay](std::string_view stream, std::string_view) { delay(stream); };
  faults->before_update = [delay] { delay("updates"); };
  return faults;
}

std::string text_of(const ToyOptions& o) {
  return fmt::format(
      "{}, {} resident, prefetch {}, subgroups of {}, {}, overlap {}, {} micro-batches, {} at once, frozen ends {}, "
      "clip {}, evaluations {}",
      o.offload.policy.text(), o.offload.resident_layers.value_or(-1), o.offload.prefetch_layers.value_or(0),
      o.offload.subgroup_size.value_or(0), name_of(o.offload.state), o.offload.overlap, o.micro_batches, o.at_once,
      o.frozen_ends, o.max_grad_norm, o.evaluate_between);
}

class DelaysOfRanks : public ::testing::TestWithParam<int> {};

TEST_P(DelaysOfRanks, ChangeNoBitUnderAnyPlan) {
  for (int run = 0; run < testing::delayed_runs(6); ++run) {
    const auto seed = static_cast<unsigned>(run * rank_shards + GetParam());
    Draw draw(seed);
    const int ranks = 2 + draw.below(2);
    ToyOptions o = drawn_work(draw, ranks);
    const ToyResult& expected = testing::reference_of(o);
    draw_plan(draw, o, ranks);
    std::vector<ToyOptions> of_ranks;
    for (int rank = 0; rank < ranks; ++rank) {
      of_ranks.push_back(testing::share_of(o, ranks));
      of_ranks.back().device.faults = drawn_delays(draw);
    }
    testing::expect_no_failure(testing::run_toy_group(
        ranks, [&](int rank) { return of_ranks[static_cast<std::size_t>(rank)]; },
        [&](ToyTrainer& t, int rank) {
          const ToyResult result = t.run();
          EXPECT_EQ(result.digest, expected.digest)
              << "run " << seed << ", rank " << rank << " of " << ranks << ", " << text_of(o);
          EXPECT_EQ(result.norms, expected.norms) << "run " << seed;
        }));
    ASSERT_FALSE(HasFailure());
  }
}

INSTANTIATE_TEST_SUITE_P(All, DelaysOfRanks, ::testing::Range(0, rank_shards));

}  // namespace
}  // namespace tandem
