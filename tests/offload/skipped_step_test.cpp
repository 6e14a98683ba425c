// A step whose gradients are not finite is as if it had never been taken: for the state, and for what comes after it.
#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "tests/offload/toy/trainer.hpp"

namespace tandem {
namespace {

using testing::toy;
using testing::ToyOptions;
using testing::ToyResult;
using testing::ToyTrainer;

constexpr int steps = 4;
constexpr int spoilt = 1;

/// The bits of all weights, as a forward gets them.
std::vector<std::uint16_t> weights_of(ToyTrainer& t) {
  std::vector<std::vector<bf16>> seen;
  for (const Layer& layer : t.layout().layers()) seen.resize(seen.size() + layer.parameters.size());
  std::size_t next = 0;
  const auto scope = t.engine().evaluation();
  for (int l = 0; l < t.layout().layer_count(); ++l) {
    const WeightsGuard weights = t.engine().fetch(l, t.stream());
    for (const Parameter& p : t.layout().layer(l).parameters) {
      const TensorView w = weights[p.name];
      std::vector<bf16>* const to = &seen[next++];
      t.toy_device().enqueue(t.stream(), "look", w, {},
                             [w, to](const bf16* values, void*) { to->assign(values, values + w.count()); });
    }
  }
  t.device().synchronize(t.stream());
  std::vector<std::uint16_t> bits;
  for (const std::vector<bf16>& parameter : seen) {
    for (const bf16 value : parameter) bits.push_back(value.bits);
  }
  return bits;
}

struct Outcome {
  ToyResult result;
  std::vector<std::uint16_t> weights;
};

Outcome train(const ToyOptions& o, bool take_spoilt) {
  ToyTrainer t(o);
  Outcome outcome;
  for (int s = 0; s < steps; ++s) {
    if (s != spoilt) {
      t.step(s, outcome.result);
    } else if (take_spoilt) {
      ToyResult apart;
      t.step(s, apart);
      EXPECT_EQ(apart.skipped, 1);
    }
  }
  EXPECT_EQ(outcome.result.skipped, 0);
  EXPECT_EQ(t.engine().step(), steps - 1);
  outcome.weights = weights_of(t);
  outcome.result.digest = t.engine().state_digest();
  return outcome;
}

void expect_as_if_never_taken(ToyOptions o) {
  const Outcome never = train(o, false);
  const int layers = testing::toy_layout(o).layer_count();
  for (const int layer : {0, layers / 2, layers - 1}) {
    o.nan_at_step = spoilt;
    o.nan_layer = layer;
    const Outcome skipped = train(o, true);
    EXPECT_EQ(skipped.result.digest, never.result.digest) << "layer " << layer;
    EXPECT_EQ(skipped.result.norms, never.result.norms) << "layer " << layer;
    EXPECT_EQ(skipped.result.losses, never.result.losses) << "layer " << layer;
    EXPECT_TRUE(skipped.weights == never.weights) << "layer " << layer;
  }
}

class SkippedStep : public ::testing::TestWithParam<std::tuple<std::string, StateFormat>> {};

TEST_P(SkippedStep, LeavesWhatFollowsAsIfItHadNeverBeenTaken) {
  const auto& [policy, state] = GetParam();
  ToyOptions o = toy(policy);
  o.offload.state = state;
  o.offload.subgroup_size = 2048;
  o.micro_batches = 3;
  for (const int at_once : {1, 3}) {
    o.at_once = at_once;
    expect_as_if_never_taken(o);
  }
}

TEST_P(SkippedStep, LeavesNothingInBuffersThatLayersShare) {
  const auto& [policy, state] = GetParam();
  ToyOptions o = toy(policy);
  o.offload.state = state;
  o.gradient = DType::bf16;
  o.micro_batches = 3;
  o.offload.prefetch_layers = 1;
  if (o.offload.policy.kind != Policy::Kind::device) o.offload.resident_layers = 0;
  for (const int at_once : {1, 3}) {
    o.at_once = at_once;
    expect_as_if_never_taken(o);
  }
}

INSTANTIATE_TEST_SUITE_P(Policies, SkippedStep,
                         ::testing::Combine(::testing::Values("device", "host", "static:0.3", "interleave:2",
                                                              "interleave:2,resident=0.4", "stream"),
                                            ::testing::ValuesIn(state_formats)));

}  // namespace
}  // namespace tandem
