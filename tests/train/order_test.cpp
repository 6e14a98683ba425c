// Order of a step's micro-batches.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/error.hpp"
#include "tests/scheduler/machines.hpp"
#include "train/setup/fastest_shape.hpp"
#include "train/setup/run_setup.hpp"

namespace tandem {
namespace {

using namespace literals;  // NOLINT: sizes
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

TrainConfig config_of(std::int64_t grad_accum, AccumulationOrder order) {
  TrainConfig config;
  config.model = "tiny-llama";
  config.device = "host";
  config.threads = config.update_threads = 1;
  config.seq_len = 32;
  config.grad_accum = grad_accum;
  config.accumulation_order = order;
  config.policy = parse_policy("host");
  config.resident_layers = 0;
  config.device_memory = 64_MiB;
  return config;
}

RunSetup set_up(const TrainConfig& config, const MachineProfile* profile = nullptr) {
  const ModelConfig model = builtin_model(config.model);
  return set_up_run(config, model, {.predicts = profile != nullptr}, {.profile = profile});
}

/// A machine whose link carries so many bytes a second, and whose device is as fast as a CPU.
MachineProfile machine(double link) {
  MachineProfile p = testing::desktop();
  p.matmul.value = p.attention.value = 50e9;
  p.to_device.value = p.to_host.value = link;
  p.both_ways.value = 1.8 * link;
  return p;
}

TEST(Order, AtOnceAreAllOrHalfOrAQuarter) {
  const RunShape shape{.batch = 2, .sequence = 32};
  const auto counts = [&](std::int64_t n, AccumulationOrder order = AccumulationOrder::automatic) {
    return more_at_once(config_of(n, order), shape);
  };
  EXPECT_THAT(counts(1), IsEmpty());
  EXPECT_THAT(counts(2), ElementsAre(2));
  EXPECT_THAT(counts(13), ElementsAre(13, 7, 4, 2));
  EXPECT_THAT(counts(8, AccumulationOrder::layer), IsEmpty());
  EXPECT_THAT(counts(8, AccumulationOrder::micro_batch), IsEmpty());
  // No more tokens than a shape may have.
  const RunShape large{.batch = 1, .sequence = max_tokens / 4};
  EXPECT_THAT(more_at_once(config_of(8, AccumulationOrder::automatic), large), ElementsAre(4, 2));
}

TEST(Order, IsThePredictedFasterOfTheTwo) {
  for (const double link : {20e6, 200e6, 20e9}) {
    const MachineProfile profile = machine(link);
    const auto seconds = [&](AccumulationOrder order) {
      return set_up(config_of(4, order), &profile).prediction->choice.simulation.step_seconds;
    };
    const double best = std::min(seconds(AccumulationOrder::layer), seconds(AccumulationOrder::micro_batch));
    EXPECT_EQ(seconds(AccumulationOrder::automatic), best) << link;
  }
}

TEST(Order, IsByLayerWhereTheLinkIsSlow) {
  const MachineProfile profile = machine(20e6);
  const RunSetup run = set_up(config_of(4, AccumulationOrder::automatic), &profile);
  EXPECT_EQ(run.plan.micro_batches_at_once, 4);
  EXPECT_EQ(run.model->shape().micro_batches, 4);
  EXPECT_THAT(run.order, StartsWith("by layer: weights cross the link twice a step instead of 2 x 4 times, "));
  EXPECT_THAT(run.order, HasSubstr("(predicted "));
  EXPECT_THAT(run.table(), HasSubstr(run.order));
}

TEST(Order, IsByMicroBatchWhereNothingIsStreamed) {
  const MachineProfile profile = machine(20e6);
  TrainConfig config = config_of(4, AccumulationOrder::automatic);
  config.policy = parse_policy("device");
  config.resident_layers = -1;
  const RunSetup run = set_up(config, &profile);
  EXPECT_EQ(run.plan.micro_batches_at_once, 1);
  EXPECT_EQ(run.order, "by micro-batch: weights stay on the device");
}

TEST(Order, OfASingleMicroBatchIsNotTold) {
  for (const AccumulationOrder order :
       {AccumulationOrder::automatic, AccumulationOrder::layer, AccumulationOrder::micro_batch}) {
    const RunSetup run = set_up(config_of(1, order));
    EXPECT_EQ(run.order, "");
    EXPECT_EQ(run.model->shape().micro_batches, 1);
  }
}

TEST(Order, AskedForIsTakenOrRefused) {
  TrainConfig config = config_of(6, AccumulationOrder::layer);
  const RunSetup run = set_up(config);
  EXPECT_EQ(run.plan.micro_batches_at_once, 6);
  EXPECT_THAT(run.order, HasSubstr("as --accumulation-order says"));
  // Room for one after another, not for all at once.
  config.recompute = Recompute{.blocks = all_blocks};
  config.offload_activations = true;
  config.prefetch_layers = 1;
  config.device_memory = 1_MiB;
  const auto least = [&](AccumulationOrder order) {
    config.accumulation_order = order;
    std::size_t low = 1_MiB, high = 64_MiB;
    while (high - low > 4096) {
      config.device_memory = (low + high) / 2;
      bool fits = true;
      try {
        set_up(config);
      } catch (const PlanError&) {
        fits = false;
      }
      (fits ? high : low) = config.device_memory;
    }
    return high;
  };
  const std::size_t one = least(AccumulationOrder::micro_batch);
  EXPECT_LT(one, least(AccumulationOrder::layer));
  EXPECT_LE(least(AccumulationOrder::automatic), one);
}

TEST(Order, IsByLayerWhereSumsOfGradientsDoNotFitOnTheHost) {
  const auto config = [](AccumulationOrder order, std::size_t host_memory) {
    TrainConfig c = config_of(6, order);
    c.host_memory = host_memory;
    return c;
  };
  const std::size_t one = set_up(config(AccumulationOrder::micro_batch, 0)).planned_host_bytes();
  const std::size_t layer = set_up(config(AccumulationOrder::layer, 0)).planned_host_bytes();
  ASSERT_LT(layer + (1 << 20), one);
  const std::size_t between = layer + (one - layer) / 2;
  EXPECT_THROW(set_up(config(AccumulationOrder::micro_batch, between)), PlanError);
  const RunSetup run = set_up(config(AccumulationOrder::automatic, between));
  EXPECT_GT(run.plan.micro_batches_at_once, 1);
  EXPECT_THAT(run.order, HasSubstr(std::string(one_does_not_fit)));
}

TEST(Order, IsNoPartOfTheComputeKey) {
  EXPECT_EQ(set_up(config_of(4, AccumulationOrder::layer)).compute_key(),
            set_up(config_of(4, AccumulationOrder::micro_batch)).compute_key());
}

}  // namespace
}  // namespace tandem
