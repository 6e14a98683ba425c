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
  EXPECT_TRUE(matches(" q_proj , v_proj", "model.layers.0.self_attn.v_proj")) << "blanks around commas are no matter";
  for (const char* text : {"q_proj,", ",", "q_proj, ,v_proj", "q_proj v_proj"}) {
    EXPECT_THROW(parse_lora_targets(text), UsageError) << text;
  }
  EXPECT_THROW(parse_lora_targets("(a"), UsageError);
  EXPECT_FALSE(matches("(.*)*!", std::string(200, 'a').c_str())) << "and is known in time";
}

std::vector<std::string> names_of(const LoraConfig& lora, std::size_t block = 0) {
  std::vector<std::string> names;
  for (const LoraModule& module : lora.modules.at(block)) names.push_back(module.name);
  return names;
}

TEST(LoraModules, AllLinearLayersOfABlockButNoRouterOrHead) {
  ModelConfig model = builtin_model("tiny-llama");
  const LoraConfig lora = lora_config(model, targets(""), "--lora-targets");
  EXPECT_THAT(names_of(lora), ElementsAre("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                                          "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"));
  EXPECT_EQ(lora.alpha, 8.0) << "twice the rank";
  model.experts = 4;
  model.chosen_experts = 2;
  EXPECT_THAT(names_of(lora_config(model, targets(""), "--lora-targets")),
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
  EXPECT_THAT(names_of(lora_config(fused, targets(""), "--lora-targets")),
              ElementsAre("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"));
  EXPECT_THAT(refusal(fused, targets("q_proj")), HasSubstr("name qkv_proj"));
  EXPECT_EQ(refusal(fused, targets("o_proj,down_proj")), "accepted");
  LoraOptions saved = targets("q_proj");
  saved.modules_to_save = {"hed"};
  EXPECT_THAT(refusal(builtin_model("tiny-llama"), saved), HasSubstr("hed"));
}

ModelConfig with_experts() {
  ModelConfig model = builtin_model("tiny-llama");
  model.experts = 4;
  model.chosen_experts = 2;
  return model;
}

LoraOptions experts(const std::string& text, const std::string& linear = "none") {
  LoraOptions options = targets(linear);
  options.experts = text;
  return options;
}

TEST(LoraModules, ExpertsAreParametersOrModules) {
  const ModelConfig model = with_experts();
  const LoraConfig all = lora_config(model, experts("all"), "--lora-targets");
  EXPECT_THAT(names_of(all), ElementsAre("mlp.experts.gate_up_proj", "mlp.experts.down_proj"));
  EXPECT_FALSE(all.modules[0][1].each_expert);
  EXPECT_THAT(target_names(model, all), ElementsAre());
  EXPECT_THAT(target_parameters(model, all), ElementsAre("mlp.experts.down_proj", "mlp.experts.gate_up_proj"));
  const LoraConfig some = lora_config(model, experts("layers.1.mlp.experts.down_proj"), "--lora-targets");
  EXPECT_THAT(names_of(some), ElementsAre());
  EXPECT_THAT(target_parameters(model, some), ElementsAre("model.layers.1.mlp.experts.down_proj"));
  const LoraConfig modules = lora_config(model, targets("gate_proj,up_proj,down_proj"), "--lora-targets");
  EXPECT_THAT(names_of(modules), ElementsAre("mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.down_proj"));
  EXPECT_TRUE(modules.modules[0][1].each_expert);
  EXPECT_THAT(target_names(model, modules), ElementsAre("down_proj", "gate_proj", "up_proj"));
  EXPECT_THAT(target_parameters(model, modules), ElementsAre());
}

TEST(LoraModules, ARouterIsAParameterOrAModuleButOnlyWhereItIsNamed) {
  ModelConfig model = with_experts();
  model.expert_names = ExpertNames::block_sparse_moe;
  for (const LoraOptions& options : {experts("gate.weight"), experts("mlp.gate.weight"), experts("", "gate"),
                                     experts("", R"(.*\.block_sparse_moe\.gate)")}) {
    const LoraConfig router = lora_config(model, options, "--lora-targets");
    EXPECT_THAT(names_of(router), ElementsAre("mlp.gate"));
    EXPECT_THAT(target_names(model, router), ElementsAre());
    EXPECT_THAT(target_parameters(model, router), ElementsAre("mlp.gate.weight"));
  }
  for (const LoraOptions& options : {experts("all"), targets("w1,w2,w3"), targets("all-linear")}) {
    EXPECT_EQ(lora_config(model, options, "--lora-targets").find(0, "mlp.gate"), nullptr);
  }
  const LoraConfig one = lora_config(model, experts("layers.1.mlp.gate.weight"), "--lora-targets");
  EXPECT_THAT(target_parameters(model, one), ElementsAre("model.layers.1.mlp.gate.weight"));
  LoraOptions beyond = experts("gate.weight");
  beyond.rank = 16;
  EXPECT_EQ(lora_config(model, beyond, "--lora-targets").find(0, "mlp.gate")->rank, 16) << "of 4 experts";
  LoraOptions patterns = experts("gate.weight", "v_proj");
  patterns.rank_pattern = {{"gate.weight", 2}};
  patterns.alpha_pattern = {{"gate", 7.0}};
  const LoraConfig ranked = lora_config(model, patterns, "--lora-targets");
  EXPECT_EQ(ranked.find(0, "mlp.gate")->rank, 2);
  EXPECT_EQ(ranked.find(0, "mlp.gate")->alpha, 7.0);
  EXPECT_EQ(ranked.find(0, "self_attn.v_proj")->rank, 4);
  LoraOptions dropped = experts("gate.weight");
  dropped.dropout = 0.5;
  EXPECT_THAT(refusal(model, dropped), HasSubstr("--lora-dropout"));
}

TEST(LoraModules, WhatAFileSaysIsBlamedOnNoFlag) {
  const auto refused = [](LoraOptions options) {
    try {
      static_cast<void>(lora_config(builtin_model("tiny-llama"), options, "adapter x: target_modules"));
    } catch (const UsageError& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_THAT(refused(targets("q_proj", 4096)), HasSubstr("adapter x: target_modules, rank 4096"));
  LoraOptions saved = targets("q_proj");
  saved.modules_to_save = {"hed"};
  EXPECT_THAT(refused(saved), HasSubstr("adapter x: modules_to_save hed"));
  for (const LoraOptions& options : {targets("q_proj", 4096), saved, targets("embed_tokens")}) {
    EXPECT_THAT(refused(options), ::testing::Not(HasSubstr("--lora")));
  }
}

TEST(LoraModules, ExpertsAreRefusedByName) {
  const ModelConfig model = with_experts();
  EXPECT_THAT(refusal(model, targets("up_proj,down_proj")), HasSubstr("name all three of their layers"));
  EXPECT_THAT(refusal(model, experts("up_proj")), HasSubstr("up_proj is no matrix of experts"));
  EXPECT_THAT(refusal(model, experts("all", "up_proj")), HasSubstr("name them once"));
  EXPECT_THAT(refusal(model, experts("")), HasSubstr("nothing has an adapter"));
  EXPECT_THAT(refusal(model, targets(R"(.*\.experts\.[01]\..*)")), HasSubstr("2 of 4 experts"));
  EXPECT_THAT(refusal(builtin_model("tiny-llama"), experts("all")), HasSubstr("has no experts"));
  LoraOptions dropped = experts("all");
  dropped.dropout = 0.5;
  EXPECT_THAT(refusal(model, dropped), HasSubstr("--lora-dropout"));
}

TEST(LoraModules, RanksAndAlphasAreThoseOfTheFirstPatternThatMatches) {
  LoraOptions options = targets("q_proj,o_proj,up_proj");
  options.rank_pattern = {{"0.self_attn.q_proj", 3}, {"q_proj", 5}, {"proj", 7}};
  options.alpha_pattern = {{R"(self_attn\..*)", 2.0}};
  const LoraConfig lora = lora_config(builtin_model("tiny-llama"), options, "--lora-targets");
  const auto is = [&](std::int64_t block, const char* name, std::int64_t rank, double alpha) {
    return *lora.find(block, name) == LoraModule{.name = name, .rank = rank, .alpha = alpha};
  };
  EXPECT_TRUE(is(0, "self_attn.q_proj", 3, 2.0));
  EXPECT_TRUE(is(1, "self_attn.q_proj", 5, 2.0));
  EXPECT_TRUE(is(1, "self_attn.o_proj", 4, 2.0)) << "a name begins after a dot";
  EXPECT_TRUE(is(0, "mlp.up_proj", 4, 8.0));
}

/// Whole names that the targets of a description match, as PEFT 0.21 finds them.
TEST(PeftConfig, LayersAndExcludedModulesAreThoseOfPeft) {
  const auto matched = [](const char* fields) {
    const PeftConfig read = parse_peft_config(std::string(R"({"peft_type": "LORA", )") + fields + "}", "folder");
    const LoraTargets parsed = parse_lora_targets(read.options.targets);
    std::vector<std::string> found;
    for (const char* layer : {"1", "11"}) {
      for (const char* module : {"self_attn.q_proj", "mlp.up_proj"}) {
        const std::string name = std::string("model.layers.") + layer + "." + module;
        if (parsed.matches(name)) found.push_back(std::string(layer) + module);
      }
    }
    return found;
  };
  EXPECT_THAT(matched(R"("target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1, 3])"),
              ElementsAre("1self_attn.q_proj", "1mlp.up_proj"));
  EXPECT_THAT(matched(R"("target_modules": ["q_proj", "model.layers.1.mlp.up_proj"], "layers_to_transform": 11)"),
              ElementsAre("1mlp.up_proj", "11self_attn.q_proj"));
  EXPECT_THAT(matched(R"("target_modules": ["layers.1.self_attn.q_proj"], "layers_to_transform": [1])"),
              ElementsAre("1self_attn.q_proj"));
  EXPECT_THAT(matched(R"("target_modules": ["q_proj", "up_proj"], "exclude_modules": ["1.mlp.up_proj", "proj"])"),
              ElementsAre("1self_attn.q_proj", "11self_attn.q_proj", "11mlp.up_proj"));
  EXPECT_THAT(matched(R"("target_modules": ".*_proj", "exclude_modules": "model\\.layers\\.11.*")"),
              ElementsAre("1self_attn.q_proj", "1mlp.up_proj"));
  for (const char* part : {"q_proj", ".*q_pro", "self_attn.q_proj"}) {
    const std::string fields = R"("target_modules": ["q_proj"], "exclude_modules": ")" + std::string(part) + "\"";
    EXPECT_THAT(matched(fields.c_str()), ElementsAre("1self_attn.q_proj", "11self_attn.q_proj"))
        << "an expression is of the whole name, and " << part << " of a part";
  }
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
  options.rank_pattern = {{"v_proj", 2}, {"a.*", 3}};
  options.alpha_pattern = {{"q_proj", 1.5}};
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
  model.stored_code = WeightCode::nf4;  // format of the model's files
  EXPECT_EQ(base_format(trained_layout(config, model)), WeightCode::nf4);
  config.freeze = "norm";
  EXPECT_EQ(base_format(trained_layout(config, model)), WeightCode::none);
  config.base = WeightCode::nf4;
  EXPECT_THROW(trained_layout(config, model), UsageError);
}

}  // namespace
}  // namespace tandem
