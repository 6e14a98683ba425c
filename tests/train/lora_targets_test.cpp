// Targets of adapters are found as PEFT finds them, and described so that PEFT finds the same.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/error.hpp"
#include "models/transformer/transformer.hpp"
#include "train/config/lora_targets.hpp"
#include "train/hf/lora_modules.hpp"
#include "train/hf/model_source.hpp"
#include "train/hf/peft_config.hpp"
#include "train/hf/trained_layout.hpp"

namespace tandem {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

LoraOptions targets(const std::string& text, std::int64_t rank = 4) {
  LoraOptions options;
  options.rank = rank;
  options.targets = text;
  return options;
}

std::string refusal(const ModelConfig& model, const LoraOptions& options) {
  try {
    static_cast<void>(lora_config(model, options, "--lora-targets"));
  } catch (const UsageError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(LoraTargets, AreNamesThatEndSoOrAPatternOfWholeNames) {
  const auto matches = [](const char* text, const char* module) { return parse_lora_targets(text).matches(module); };
  EXPECT_TRUE(matches("q_proj,v_proj", "model.layers.0.self_attn.q_proj"));
  EXPECT_FALSE(matches("q_proj,v_proj", "model.layers.0.self_attn.k_proj"));
  EXPECT_FALSE(matches("proj", "model.layers.0.self_attn.k_proj")) << "a name ends at a dot";
  EXPECT_TRUE(matches("attn.c_proj", "transformer.h.3.attn.c_proj"));
  EXPECT_FALSE(matches("attn.c_proj", "transformer.h.3.mlp.c_proj"));
  EXPECT_TRUE(matches("model.layers.1.mlp.up_proj", "model.layers.1.mlp.up_proj"));
  EXPECT_TRUE(matches(R"(.*\.[01]\.mlp\..*)", "model.layers.1.mlp.up_proj"));
  EXPECT_FALSE(matches(R"(mlp\..*)", "model.layers.1.mlp.up_proj")) << "all of the name must match";
  EXPECT_TRUE(matches("all-linear", "anything"));
  EXPECT_THROW(parse_lora_targets("q_proj,"), UsageError);
  EXPECT_THROW(parse_lora_targets("(a"), UsageError);
  EXPECT_FALSE(matches("(.*)*!", std::string(200, 'a').c_str())) << "and is known in time";
}

TEST(LoraModules, AllLinearLayersOfABlockButNoRouterOrHead) {
  ModelConfig model = builtin_model("tiny-llama");
  const LoraConfig lora = lora_config(model, targets(""), "--lora-targets");
  EXPECT_THAT(lora.modules.at(0), ElementsAre("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                                              "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"));
  EXPECT_EQ(lora.alpha, 8.0) << "twice the rank";
  model.experts = 4;
  model.chosen_experts = 2;
  EXPECT_THAT(lora_config(model, targets(""), "--lora-targets").modules.at(0),
              ElementsAre("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"));
}

TEST(LoraModules, RefuseByName) {
  const ModelConfig model = builtin_model("tiny-gpt2");
  EXPECT_THAT(refusal(model, targets("c_atn")), HasSubstr("perhaps c_attn"));
  EXPECT_THAT(refusal(model, targets("ln_1")), HasSubstr("no linear layer of a block"));
  EXPECT_THAT(refusal(model, targets("lm_head")), HasSubstr("--lora-modules-to-save"));
  EXPECT_THAT(refusal(model, targets("c_.*")), HasSubstr("named like transformer.h."));
  EXPECT_THAT(refusal(model, targets("c_attn", 4096)), HasSubstr("transformer.h.0.attn.c_attn"));
  ModelConfig fused = builtin_model("tiny-llama");
  fused.fused_tensors = true;
  EXPECT_THAT(refusal(fused, targets("")), HasSubstr("qkv_proj"));
  EXPECT_EQ(refusal(fused, targets("o_proj,down_proj")), "accepted");
  LoraOptions saved = targets("q_proj");
  saved.modules_to_save = {"hed"};
  EXPECT_THAT(refusal(builtin_model("tiny-llama"), saved), HasSubstr("hed"));
}

TEST(LoraModules, NamesForPeftAreTheShortestThatNameTheseAlone) {
  ModelConfig model = builtin_model("tiny-gpt2");
  const auto names = [&](const std::string& text) {
    return target_names(model, lora_config(model, targets(text), "--lora-targets"));
  };
  EXPECT_THAT(names(""), ElementsAre("c_attn", "c_fc", "c_proj"));
  EXPECT_THAT(names("attn.c_proj"), ElementsAre("attn.c_proj"));
  EXPECT_THAT(names(R"(.*\.0\.attn\.c_attn)"), ElementsAre("transformer.h.0.attn.c_attn"));
}

TEST(PeftConfig, IsReadBackAsItWasWritten) {
  ModelConfig model = builtin_model("tiny-llama");
  LoraOptions options = targets("q_proj,v_proj");
  options.alpha = 7.5;
  options.dropout = 0.25;
  options.rank_stabilized = true;
  options.modules_to_save = {"norm"};
  model.lora = lora_config(model, options, "--lora-targets");
  const PeftConfig read = parse_peft_config(peft_config_text(model, options, "org/base"), "folder");
  EXPECT_EQ(read.options, options);
  EXPECT_EQ(read.base, "org/base");
}

TEST(TrainedLayout, TrainsAdaptersAndSavedModulesAlone) {
  TrainConfig config;
  config.lora = targets("q_proj");
  config.lora.modules_to_save = {"lm_head"};
  ModelConfig model = builtin_model("tiny-llama");
  model.lora = lora_config(model, config.lora, "--lora-targets");
  const ParameterLayout layout = trained_layout(config, model);
  for (const Parameter* p : layout.owned_parameters()) {
    const bool table = p->name == (model.tied_head ? "tokens" : "lm_head");
    EXPECT_EQ(p->options.trainable, is_adapter(*p) || table) << p->full_name;
    EXPECT_FALSE(p->coded());
  }
  config.base = WeightCode::nf4;
  int coded = 0;
  const ParameterLayout stored = trained_layout(config, model);
  for (const Parameter* p : stored.owned_parameters()) {
    coded += p->coded() ? 1 : 0;
  }
  EXPECT_EQ(coded, model.layers * 7) << "matrices of blocks, and neither norms nor the table";
  TrainConfig all_trained;
  all_trained.base = WeightCode::nf4;
  EXPECT_THROW(trained_layout(all_trained, builtin_model("tiny-llama")), UsageError);
}

TEST(TrainedLayout, StoresFrozenMatricesOfBlocksInFewerBits) {
  ModelConfig model = builtin_model("tiny-llama");
  TrainConfig config;
  config.freeze = "layers.0|embed|norm";
  EXPECT_EQ(base_format(trained_layout(config, model)), WeightCode::none);
  config.base = WeightCode::int8;
  const ParameterLayout layout = trained_layout(config, model);
  EXPECT_EQ(base_format(layout), WeightCode::int8);
  for (const Parameter* p : layout.owned_parameters()) {
    const bool matrix = p->layer == 1 && p->shape.rank() > 1;
    EXPECT_EQ(p->coded(), matrix) << p->full_name;
    EXPECT_EQ(p->options.trainable, !matrix && p->name != "tokens" && p->full_name.find("norm") == std::string::npos)
        << p->full_name;
  }
  config.base = std::nullopt;
  model.stored_code = WeightCode::nf4;  // as its files have it
  EXPECT_EQ(base_format(trained_layout(config, model)), WeightCode::nf4);
  config.freeze = "norm";
  EXPECT_EQ(base_format(trained_layout(config, model)), WeightCode::none);
  config.base = WeightCode::nf4;
  EXPECT_THROW(trained_layout(config, model), UsageError);
}

}  // namespace
}  // namespace tandem
