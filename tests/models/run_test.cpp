// How a transformer uses memory and its parameters.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>

#include "tests/models/rig.hpp"
#include "tests/offload/idle_device.hpp"

namespace tandem::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Bytes of a model's row of memory in a shape, on the device of `ops`.
std::size_t bytes_of(const ModelConfig& config, const RunShape& shape, const Ops& ops, std::string_view row) {
  const auto rows = Transformer(config, shape).memory(ops);
  return std::ranges::find(rows, row, &ActivationEntry::name)->bytes;
}

TEST(TransformerMemory, BindTakesExactlyWhatMemorySays) {
  for (const char* name : {"tiny-gpt2", "tiny-llama", "tiny-moe"}) {
    for (const DType compute : {DType::f32, DType::bf16}) {
      for (const bool training : {true, false}) {
        for (const std::int64_t recomputed : {0, 1, 2}) {
          for (const std::int64_t micro_batches : {1, 4}) {
            if (micro_batches > 1 && !training) continue;
            for (const bool selective : {false, true}) {
              const RunShape shape{.batch = 3,
                                   .sequence = 17,
                                   .micro_batches = micro_batches,
                                   .compute = compute,
                                   .recomputed_blocks = recomputed,
                                   .selective = selective,
                                   .training = training};
              Rig rig(tiny(name), shape);
              EXPECT_EQ(rig.carved(), total_bytes(rig.model().memory(rig.device().ops()))) << name;
              for (const ActivationEntry& e : rig.model().memory(rig.device().ops())) {
                EXPECT_EQ(e.bytes % arena_alignment, 0U) << e.name;
              }
            }
          }
        }
      }
    }
  }
}

// Scratch of the ops lies where the blocks' buffers do: block inputs, the gradient and the head's take 12 MB,
// and in fp32 the rows of the tied table's gradient that tokens name their own.
TEST(TransformerMemory, Gpt2RecomputedAtSequence256TakesLittleBesideScratch) {
  HostDevice device({.capacity = 1 << 20, .threads = 2, .update_threads = 1});
  const std::size_t scratch = device.ops().workspace_bytes({.tokens = 256,
                                                            .sequence = 256,
                                                            .vocabulary = 50257,
                                                            .channels = 3072,
                                                            .heads = 12,
                                                            .head_dim = 64,
                                                            .activations = DType::f32,
                                                            .head_rows = 50257,
                                                            .token_rows = true});
  const ModelConfig config = builtin_model("gpt2");
  const Transformer model(config, {.batch = 1, .sequence = 256, .recomputed_blocks = config.layers});
  const auto rows = model.memory(device.ops());
  const std::size_t token_rows = 256 * 768 * sizeof(float);
  for (const ActivationEntry& row : rows) RecordProperty(row.name, std::to_string(row.bytes));
  EXPECT_LE(total_bytes(rows), std::max<std::size_t>(30'000'000, scratch + token_rows + 12'000'000));
}

TEST(TransformerMemory, ForwardAloneTakesLeast) {
  HostDevice device({.capacity = 1 << 20, .threads = 2, .update_threads = 1});
  for (const char* name : {"gpt2", "llama3.2-1b", "qwen3-0.6b"}) {
    RunShape shape{.batch = 2, .sequence = 128};
    const ModelConfig config = builtin_model(name);
    const std::size_t kept = total_bytes(Transformer(config, shape).memory(device.ops()));
    shape.recomputed_blocks = config.layers;
    const std::size_t recomputed = total_bytes(Transformer(config, shape).memory(device.ops()));
    shape.training = false;
    const std::size_t forward = total_bytes(Transformer(config, shape).memory(device.ops()));
    EXPECT_LT(forward, recomputed) << name;
    EXPECT_LT(recomputed, kept) << name;
  }
}

// The recomputed blocks work in a kept block's buffers, so each block that keeps its own takes as much more as the
// last.
TEST(TransformerMemory, KeepingOneMoreBlockTakesOneSetOfBuffersForEachMicroBatch) {
  HostDevice device({.capacity = 1 << 20, .threads = 2, .update_threads = 1});
  for (const char* name : {"tiny-gpt2", "tiny-llama"}) {
    ModelConfig config = builtin_model(name);
    config.layers = 7;
    const auto row = [&](std::string_view of, std::int64_t recomputed, std::int64_t micro_batches) {
      const RunShape shape{.batch = 3, .sequence = 17, .micro_batches = micro_batches, .recomputed_blocks = recomputed};
      return bytes_of(config, shape, device.ops(), of);
    };
    const auto kept = [&](std::int64_t recomputed, std::int64_t micro_batches) {
      return row("activations, kept", recomputed, micro_batches);
    };
    const std::size_t set = kept(6, 1) - kept(7, 1);
    EXPECT_GT(set, 10 * 3 * 17 * static_cast<std::size_t>(config.width) * sizeof(float));
    for (const std::int64_t micro_batches : {1, 3}) {
      for (std::int64_t recomputed = 0; recomputed < 7; ++recomputed) {
        EXPECT_EQ(kept(recomputed, micro_batches) - kept(recomputed + 1, micro_batches),
                  static_cast<std::size_t>(micro_batches) * set)
            << name << " " << recomputed;
        EXPECT_EQ(row("workspace", recomputed, micro_batches), row("workspace", 0, micro_batches)) << recomputed;
      }
    }
    EXPECT_GT(row("workspace", 7, 1), row("workspace", 6, 1));
  }
}

// Rows of experts are numbered in 32 bits.
TEST(TransformerMemory, MoreRowsOfExpertsThanCanBeNumberedAreRefused) {
  ModelConfig config = builtin_model("tiny-moe");
  config.positions = std::int64_t{1} << 24;
  config.experts = config.chosen_experts = 128;
  EXPECT_NO_THROW(Transformer(config, {.sequence = (std::int64_t{1} << 24) - 1}));
  config.experts = config.chosen_experts = 129;
  EXPECT_THROW(Transformer(config, {.sequence = (std::int64_t{1} << 24) - 1}), UsageError);
}

// Memory kept for a block, in N C e, when norms and the activation of its MLP run again; their results have one place
// that all blocks share.
TEST(TransformerMemory, SelectivelyABlockKeepsWhatProductsAndAttentionMade) {
  HostDevice device({.capacity = 1 << 20, .threads = 2, .update_threads = 1});
  const auto activation = [](std::int64_t width) { return align_up(64 * static_cast<std::size_t>(width) * 2); };
  for (const char* name : {"gpt2", "llama3.2-1b", "qwen3-0.6b", "olmo2-7b", "gemma3-1b", "olmoe-1b-7b"}) {
    const ModelConfig c = builtin_model(name);
    const RunShape all{.batch = 1, .sequence = 64, .compute = DType::bf16};
    RunShape some = all;
    some.selective = true;
    const std::int64_t queries = c.heads * c.head_dim, keys = c.kv_heads * c.head_dim;
    std::size_t shared = (c.norm_before ? 2 : 0) * activation(c.width) + activation(c.ffn * c.mlp_rows());
    if (c.qk_norm != QkNorm::none) shared += activation(queries) + activation(keys);
    const auto layers = static_cast<std::size_t>(c.layers);
    EXPECT_EQ(
        bytes_of(c, all, device.ops(), "activations, kept") - bytes_of(c, some, device.ops(), "activations, kept"),
        layers * shared)
        << name;
    EXPECT_LE(bytes_of(c, some, device.ops(), "workspace"), bytes_of(c, all, device.ops(), "workspace") + shared);
  }
}

// Ops that take GELU before its input is rounded cannot make it again from the rounded one.
TEST(TransformerMemory, SelectivelyABlockKeepsGeluWhereOpsDoNotRepeatIt) {
  class Fusing : public testing::IdleOps {
    bool repeats_gelu() const noexcept override { return false; }
  };
  const auto kept = [](const char* name, const Ops& ops) {
    return bytes_of(builtin_model(name), {.batch = 1, .sequence = 64, .selective = true}, ops, "activations, kept");
  };
  const ModelConfig gpt2 = builtin_model("gpt2");
  EXPECT_EQ(kept("gpt2", Fusing()) - kept("gpt2", testing::IdleOps()),
            static_cast<std::size_t>(gpt2.layers * 64 * gpt2.ffn) * sizeof(float));
  EXPECT_EQ(kept("llama3.2-1b", Fusing()), kept("llama3.2-1b", testing::IdleOps()));
}

/// Two training steps with an evaluation between; the gradients of both.
std::vector<Gradients> two_steps(Rig& rig) {
  std::vector<Gradients> all;
  rig.load_random(3);
  for (const std::int32_t first : {1, 90}) {
    rig.set_batch(ramp(34, first), ramp(34, first + 7));
    rig.train(0.25F);
    all.push_back(rig.gradients());
    rig.evaluate();
  }
  return all;
}

/// Some layers of each kind of block: GPT-2's, one with norms before attention and MLP, one with norms after them whose
/// layers have different kinds of attention, one with norms in both places, of 1 + weight, and a gate of GELU; and
/// experts in the first two.
std::vector<ModelConfig> kinds_of_block() {
  ModelConfig gpt2 = builtin_model("tiny-gpt2"), before = builtin_model("tiny-llama");
  gpt2.layers = before.layers = 5;
  before.qk_norm = QkNorm::per_head;
  ModelConfig after = before;
  after.name = "tiny-olmo";
  after.qk_norm = QkNorm::whole;
  after.norm_before = false;
  after.norm_after = true;
  after.window = 6;
  after.scales_all = false;
  after.rope_scaling = LinearRopeScaling{2.0};
  after.attention = {{}, {.windowed = true}, {.rotated = false}, {.rotated = false, .windowed = true}, {}};
  ModelConfig both = after;
  both.name = "tiny-gemma";
  both.layers = 3;
  both.attention.resize(3);
  both.norm_before = true;
  both.norm_offset = 1.0;
  both.gate = Gate::gelu;
  both.qk_norm = QkNorm::per_head;
  both.window_theta = 50.0;
  ModelConfig experts_before = builtin_model("tiny-moe"), experts_after = after;
  experts_before.layers = 3;
  experts_after.name = "tiny-olmo-moe";
  experts_after.ffn = 40;
  experts_after.experts = 6;
  experts_after.chosen_experts = 3;
  return {gpt2, before, after, both, experts_before, experts_after};
}

TEST(TransformerRecompute, HoweverManyBlocksAreComputedAgainNoBitChanges) {
  for (const ModelConfig& config : kinds_of_block()) {
    for (const DType compute : {DType::f32, DType::bf16}) {
      const std::string& name = config.name;
      RunShape shape{.batch = 2, .sequence = 17, .compute = compute};
      Rig kept(config, shape);
      const std::vector<Gradients> expected = two_steps(kept);
      for (const bool selective : {false, true}) {
        shape.selective = selective;
        for (shape.recomputed_blocks = 0; shape.recomputed_blocks <= config.layers; ++shape.recomputed_blocks) {
          Rig rig(config, shape);
          EXPECT_EQ(two_steps(rig), expected) << name << " " << activations_of(config, shape);
        }
      }
    }
  }
}

// Seven inputs pass through a ring of three; whichever copy stream lags, nothing is read before it has come
// back, nor overwritten before it has left.
TEST(TransformerOffload, InputsOnTheHostChangeNoBitWhicheverStreamLags) {
  ModelConfig config = builtin_model("tiny-llama");
  config.layers = 6;
  RunShape shape{.batch = 2, .sequence = 17, .recomputed_blocks = config.layers};
  Rig kept(config, shape);
  const std::vector<Gradients> expected = two_steps(kept);
  shape.offload_inputs = true;
  for (const std::string slow : {"", "activations to host", "activations to device", "compute"}) {
    auto faults = std::make_shared<HostFaults>();
    faults->before_task = [slow](std::string_view stream, std::string_view) {
      if (stream == slow) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    };
    Rig offloaded(config, shape, faults);
    EXPECT_EQ(two_steps(offloaded), expected) << slow;
    EXPECT_LT(offloaded.carved(), kept.carved());
    // Inputs of two steps; evaluation keeps nothing.
    const std::uint64_t left = 2 * 4 * 34 * static_cast<std::uint64_t>(config.width) * sizeof(float);
    EXPECT_EQ(offloaded.model().input_traffic().to_host, left);
    EXPECT_EQ(offloaded.model().input_traffic().to_device, left);
  }
}

/// Losses and gradients of each of `batches` micro-batches, `at_once` of them through each layer.
struct Trained {
  std::vector<float> losses;
  std::vector<Gradients> gradients;
  friend bool operator==(const Trained&, const Trained&) = default;
};

Trained train_at_once(const ModelConfig& config, RunShape shape, std::int64_t batches, std::int64_t at_once,
                      std::shared_ptr<HostFaults> faults = nullptr, DType ends = DType::f32) {
  shape.micro_batches = at_once;
  Rig rig(config, shape, std::move(faults), DType::f32, ends);
  rig.load_random(3);
  const std::int64_t tokens = shape.batch * shape.sequence;
  Trained all;
  for (std::int64_t first = 0; first < batches; first += at_once) {
    const std::int64_t n = std::min(at_once, batches - first);
    for (std::int64_t micro = 0; micro < n; ++micro) {
      const auto begin = static_cast<std::int32_t>(1 + 31 * (first + micro));
      rig.set_batch(ramp(tokens, begin), ramp(tokens, begin + 7), micro);
    }
    const std::vector<float> losses = rig.train(0.25F, n);
    all.losses.insert(all.losses.end(), losses.begin(), losses.end());
    for (std::int64_t micro = 0; micro < n; ++micro) {
      all.gradients.push_back(rig.gradients(static_cast<std::size_t>(micro)));
    }
    EXPECT_EQ(rig.parameters().held(), 0);
    rig.evaluate();  // in between, with the first micro-batch's buffers
  }
  return all;
}

// Three and five, all at once or as many as two and three, so that the last are fewer than there is room for.
TEST(TransformerAtOnce, MicroBatchesThroughALayerAtOnceChangeNoBit) {
  for (const char* name : {"tiny-gpt2", "tiny-llama", "tiny-moe"}) {
    const bool experts = name == std::string_view("tiny-moe");
    for (const bool tied : {true, false}) {
      if (tied && experts) continue;  // tiny-llama has covered tied tables
      ModelConfig config = builtin_model(name);
      config.layers = 3;
      config.tied_head = tied;
      const Trained expected = train_at_once(config, {.batch = 2, .sequence = 9}, 5, 1);
      EXPECT_NE(expected.gradients[0], expected.gradients[4]);
      const std::vector<RunShape> shapes = {{.recomputed_blocks = 0},
                                            {.recomputed_blocks = 1},
                                            {.recomputed_blocks = 2},
                                            {.recomputed_blocks = 3},
                                            {.recomputed_blocks = 3, .offload_inputs = true},
                                            {.recomputed_blocks = 0, .selective = true},
                                            {.recomputed_blocks = 2, .selective = true}};
      for (RunShape shape : shapes) {
        shape.batch = 2;
        shape.sequence = 9;
        for (const std::int64_t at_once : {1, 2, 3, 5, 6}) {
          if (experts && at_once != 2 && at_once != 5) continue;
          EXPECT_EQ(train_at_once(config, shape, 5, at_once), expected)
              << name << " " << activations_of(config, shape) << " " << at_once;
        }
      }
    }
  }
}

// Inputs of seven layers and up to five micro-batches pass through a ring of seven.
TEST(TransformerAtOnce, OffloadedInputsChangeNoBitWhicheverStreamLags) {
  ModelConfig config = builtin_model("tiny-gpt2");
  config.layers = 6;
  RunShape shape{.batch = 1, .sequence = 11, .recomputed_blocks = config.layers};
  const Trained expected = train_at_once(config, shape, 5, 1);
  shape.offload_inputs = true;
  for (const std::string slow : {"activations to host", "activations to device", "compute"}) {
    for (const std::int64_t at_once : {2, 5}) {
      auto faults = std::make_shared<HostFaults>();
      faults->before_task = [slow](std::string_view stream, std::string_view) {
        if (stream == slow) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      };
      EXPECT_EQ(train_at_once(config, shape, 5, at_once, faults), expected) << slow << " " << at_once;
    }
  }
}

// The gradient is made last, from the head's inputs that were kept, or waits for the embedding.
TEST(TransformerAtOnce, ATablesGradientWrittenWholeHasTheSameBitsWhenItIsMadeLast) {
  for (const char* name : {"tiny-gpt2", "tiny-llama"}) {
    for (const DType compute : {DType::f32, DType::bf16}) {
      const ModelConfig config = tiny(name);
      const RunShape shape{.batch = 2, .sequence = 9, .compute = compute, .recomputed_blocks = 1};
      ASSERT_FALSE(makes_table_last(config, shape));
      ASSERT_EQ(ends_gradient(config, shape), DType::bf16);
      const Trained expected = train_at_once(config, shape, 5, 1, nullptr, DType::bf16);
      for (const std::int64_t at_once : {2, 5}) {
        EXPECT_EQ(train_at_once(config, shape, 5, at_once, nullptr, DType::bf16), expected) << name << at_once;
      }
    }
  }
}

TEST(TransformerAtOnce, OffloadedInputsTakeNoMoreOfTheDeviceForMoreLayers) {
  HostDevice device({.capacity = 1 << 20, .threads = 2, .update_threads = 1});
  const auto kept = [&](std::int64_t layers) {
    ModelConfig config = builtin_model("tiny-gpt2");
    config.layers = layers;
    const RunShape shape{
        .batch = 1, .sequence = 64, .micro_batches = 4, .recomputed_blocks = layers, .offload_inputs = true};
    return bytes_of(config, shape, device.ops(), "activations, kept");
  };
  EXPECT_EQ(kept(4), kept(40));
}

TEST(TransformerAccess, AFetchedLayerServesEveryMicroBatch) {
  Rig rig(tiny("tiny-llama"), {.batch = 1, .sequence = 8, .micro_batches = 2, .recomputed_blocks = 2});
  rig.load_random(1);
  for (const std::int64_t micro : {0, 1}) rig.set_batch(ramp(8, 3), ramp(8, 10), micro);
  rig.parameters().clear_log();
  rig.train(1.0F, 2);
  EXPECT_THAT(rig.parameters().log(),
              ElementsAre("fetch 0", "release 0", "fetch 1", "release 1", "fetch 2", "release 2",        //
                          "fetch 3", "gradients 3", "commit 3", "gradients 3", "release 3", "commit 3",  //
                          "fetch 2", "gradients 2", "commit 2", "gradients 2", "release 2", "commit 2",  //
                          "fetch 1", "gradients 1", "commit 1", "gradients 1", "release 1", "commit 1",  //
                          "gradients 0", "fetch 0", "commit 0", "gradients 0", "release 0", "commit 0"))
      << "the embedding is fetched for the head's part of its gradient";
}

TEST(TransformerAccess, EachLayerIsFetchedAndReleasedInOrder) {
  for (const std::int64_t recomputed : {0, 1, 2}) {
    Rig rig(tiny("tiny-llama"), {.batch = 1, .sequence = 8, .recomputed_blocks = recomputed});
    rig.load_random(1);
    rig.set_batch(ramp(8, 3), ramp(8, 10));
    rig.parameters().clear_log();
    rig.train(1.0F);
    EXPECT_THAT(rig.parameters().log(),
                ElementsAre("fetch 0", "release 0", "fetch 1", "release 1", "fetch 2", "release 2",  //
                            "fetch 3", "gradients 3", "release 3", "commit 3",                       //
                            "fetch 2", "gradients 2", "release 2", "commit 2",                       //
                            "fetch 1", "gradients 1", "release 1", "commit 1",                       //
                            "gradients 0", "commit 0"));
    EXPECT_EQ(rig.parameters().held(), 0);
  }
}

TEST(TransformerAccess, EvaluationLeavesNothingHeld) {
  Rig rig(tiny("tiny-gpt2"), {.batch = 1, .sequence = 8, .training = false});
  rig.load_random(1);
  rig.set_batch(ramp(8, 3), ramp(8, 10));
  rig.parameters().clear_log();
  rig.evaluate();
  EXPECT_THAT(rig.parameters().log(), ElementsAre("fetch 0", "release 0", "fetch 1", "release 1", "fetch 2",
                                                  "release 2", "fetch 3", "release 3"));
  rig.evaluate();
  rig.logits(7);
  EXPECT_EQ(rig.parameters().held(), 0);
}

/// Layout of `config`, with the parameters of one layer frozen.
ParameterLayout frozen(const ModelConfig& config, int frozen_layer) {
  const ParameterLayout all = layout_of(config, DType::f32);
  ParameterLayout layout;
  for (int i = 0; i < all.layer_count(); ++i) {
    auto layer = layout.add_layer(all.layer(i).name);
    for (const Parameter& p : all.layer(i).parameters) {
      ParameterOptions options = p.options;
      options.trainable = i != frozen_layer;
      layer.add(p.name, p.shape, options);
    }
  }
  if (config.tied_head) layout.tie("embedding.tokens", "head.lm_head");
  return layout;
}

TEST(TransformerAccess, FrozenLayersChangeNoOtherGradient) {
  for (const char* name : {"tiny-gpt2", "tiny-llama"}) {
    const ModelConfig config = tiny(name);
    Rig rig(config, {.batch = 2, .sequence = 9});
    rig.load_random(5);
    rig.set_batch(ramp(18, 3), ramp(18, 10));
    rig.train(0.5F);
    const Gradients expected = rig.gradients();
    for (const int layer : {0, 1}) {
      PlainParameters parameters(rig.device(), frozen(config, layer));
      for (const Parameter* p : parameters.layout().owned_parameters()) {
        std::vector<float> values(static_cast<std::size_t>(p->count));
        initialize_parameter(config, *p, 5, 0, values);
        parameters.set(*p, values);
      }
      parameters.clear_gradients();
      rig.model().train(parameters, 0.5F, rig.stream());
      rig.device().synchronize(rig.stream());
      for (const Parameter* p : parameters.layout().owned_parameters()) {
        const std::vector<float> gradient = parameters.gradient(*p);
        if (p->options.trainable) {
          EXPECT_EQ(gradient, expected.at(hf_tensor_of(config, *p).name)) << p->full_name;
        } else {
          EXPECT_THAT(gradient, ::testing::Each(0.0F)) << p->full_name;
        }
      }
    }
  }
}

// It prefers some tokens to others a little, its own input among them: 24 models were 0.01 to 0.14 worse than guessing.
TEST(Transformer, AnUntrainedModelIsAsGoodAsGuessing) {
  constexpr int models = 4;
  for (const char* name : {"tiny-gpt2", "tiny-llama"}) {
    for (const DType compute : {DType::f32, DType::bf16}) {
      Rig rig(tiny(name), {.batch = 2, .sequence = 64, .compute = compute, .training = false});
      rig.set_batch(ramp(128, 3), ramp(128, 11));
      double sum = 0.0;
      for (std::uint64_t seed = 0; seed < models; ++seed) {
        rig.load_random(seed);
        for (const float loss : rig.evaluate()) sum += static_cast<double>(loss);
      }
      EXPECT_NEAR(sum / (128.0 * models), std::log(256.0), 0.1) << name;
    }
  }
}

/// Both models have an embedding and a head of their own.
TEST(Transformer, TrainingInBf16IsNearFp32) {
  for (const char* name : {"tiny-gpt2", "tiny-llama"}) {
    std::vector<float> losses[2];
    for (const DType compute : {DType::f32, DType::bf16}) {
      Rig rig(tiny(name), {.batch = 1, .sequence = 33, .compute = compute, .recomputed_blocks = 2});
      rig.load_random(7);
      rig.set_batch(ramp(33, 3), ramp(33, 11));
      losses[compute == DType::bf16 ? 1 : 0] = rig.train(1.0F);
      EXPECT_EQ(rig.parameters().held(), 0);
    }
    for (std::size_t i = 0; i < losses[0].size(); ++i) EXPECT_NEAR(losses[1][i] / losses[0][i], 1.0, 0.02) << name;
  }
}

TEST(Transformer, RefusesShapesBeyondTheModel) {
  const auto message_of = [](const RunShape& shape) -> std::string {
    try {
      Transformer(builtin_model("tiny-gpt2"), shape);
    } catch (const UsageError& e) {
      return e.what();
    }
    return "";
  };
  EXPECT_THAT(message_of({.batch = 1, .sequence = 257}), HasSubstr("256 positions"));
  EXPECT_THAT(message_of({.batch = 1, .sequence = 0}), HasSubstr("256 positions"));
  EXPECT_THAT(message_of({.batch = 0, .sequence = 8}), HasSubstr("micro-batch"));
  EXPECT_THAT(message_of({.batch = std::int64_t{1} << 40, .sequence = 8}), HasSubstr("micro-batch"));
  EXPECT_THAT(message_of({.batch = 1, .sequence = 8, .micro_batches = std::int64_t{1} << 22}), HasSubstr("at once"));
  EXPECT_EQ(message_of({.batch = 1, .sequence = 256}), "");
}

TEST(Transformer, UseAgainstTheContractIsNamed) {
  Rig forward(tiny("tiny-gpt2"), {.batch = 1, .sequence = 8, .training = false});
  forward.load_random(1);
  EXPECT_THROW(forward.train(1.0F), MisuseError);
  EXPECT_THROW(forward.logits(8), MisuseError);
  EXPECT_THROW(forward.logits(-1), MisuseError);
  Rig two(tiny("tiny-gpt2"), {.batch = 1, .sequence = 8, .micro_batches = 2});
  EXPECT_THROW(two.train(1.0F, 3), MisuseError);
  EXPECT_THROW(two.train(1.0F, 0), MisuseError);
  EXPECT_THROW(two.model().tokens(2), MisuseError);
  EXPECT_THROW(Transformer(tiny("tiny-gpt2"), {.micro_batches = 2, .training = false}), MisuseError);
  EXPECT_THROW(Transformer(tiny("tiny-gpt2"), {.recomputed_blocks = 3}), MisuseError);
  EXPECT_THROW(Transformer(tiny("tiny-gpt2"), {.recomputed_blocks = -1}), MisuseError);
  EXPECT_THROW(Transformer(tiny("tiny-gpt2"), {.recomputed_blocks = 1, .offload_inputs = true}), MisuseError);
  Transformer unbound(tiny("tiny-gpt2"), {.batch = 1, .sequence = 8});
  EXPECT_THROW(unbound.train(forward.parameters(), 1.0F, forward.stream()), MisuseError);
}

}  // namespace
}  // namespace tandem::testing
